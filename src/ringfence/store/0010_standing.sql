-- What else a question says of its answer (a reason, who is asked later, how far it may stand), and which calls are like
-- the one it is about; and the approvals of people that stand for such calls.
ALTER TABLE approvals ADD COLUMN terms TEXT NOT NULL DEFAULT '{}';
ALTER TABLE approvals ADD COLUMN shape TEXT;
CREATE TABLE standing (
    id         TEXT    PRIMARY KEY,
    digest     TEXT    NOT NULL,
    call_id    TEXT    NOT NULL,
    principal  TEXT    NOT NULL,
    tool       TEXT    NOT NULL,
    rule       TEXT    NOT NULL,
    person     TEXT    NOT NULL,
    shape      TEXT    NOT NULL,
    times      INTEGER NOT NULL,
    used       INTEGER NOT NULL DEFAULT 0,
    made_at    REAL    NOT NULL,
    expires_at REAL    NOT NULL,
    revoked_at REAL
) WITHOUT ROWID;
CREATE INDEX standing_by_digest ON standing (digest);
