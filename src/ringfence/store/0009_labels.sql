-- What agents, their sessions and places have been touched by: labels, since when and by which call.
CREATE TABLE labels (
    scope    TEXT NOT NULL,
    label    TEXT NOT NULL,
    first_at REAL NOT NULL,
    last_at  REAL NOT NULL,
    call_id  TEXT NOT NULL,
    tool     TEXT NOT NULL,
    PRIMARY KEY (scope, label)
) WITHOUT ROWID;
-- Where a session has a volume, what is in the one gets into the other.
CREATE TABLE label_links (
    scope TEXT NOT NULL,
    other TEXT NOT NULL,
    PRIMARY KEY (scope, other)
) WITHOUT ROWID;
