-- Signed checkpoints of earlier heads of a chain, as their file had them: a prune follows a chain from its first record
-- to the next of these, and need not read on to its end.
CREATE TABLE heads (
    chain TEXT    NOT NULL,
    seq   INTEGER NOT NULL,
    line  BLOB    NOT NULL,
    PRIMARY KEY (chain, seq)
) WITHOUT ROWID;
