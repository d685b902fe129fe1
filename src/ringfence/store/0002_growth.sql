-- Prunes that are under way: each chain's records up to `seq` are to go. The signed word on it lies with its checkpoint.
CREATE TABLE prunes (
    chain TEXT    PRIMARY KEY,
    seq   INTEGER NOT NULL
) WITHOUT ROWID;

-- As before, each call closes only once; smaller, since the hash of every other record need not be in it.
DROP INDEX records_by_call;
CREATE UNIQUE INDEX records_by_call ON records (call_id, iif(kind = 'finished', 0, id)) WHERE call_id IS NOT NULL;

-- Calls as they ended, in the order in which they did: what a list shows, whatever else was recorded in between.
CREATE INDEX records_ended ON records (id) WHERE kind = 'finished';
CREATE INDEX approvals_by_use ON approvals (consumed_by) WHERE consumed_by IS NOT NULL;

-- What many records have in common, such as a contract or the isolation of a box, is said once: they name it by the SHA-256 of its text.
-- `at`: when it was last said. Whoever names it says it again after a while, so one that was not said for long is named by nobody.
CREATE TABLE shared (
    digest TEXT PRIMARY KEY,
    text   TEXT NOT NULL,
    at     REAL NOT NULL
) WITHOUT ROWID;
