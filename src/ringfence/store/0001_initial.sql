-- The audit log. `id` is the order of commit over all chains; everything but `text` and `hash` repeats the text.
-- `salt` is no part of the record: it opens the digests in its text, and can be erased without breaking the chain.
CREATE TABLE records (
    id      INTEGER PRIMARY KEY,
    chain   TEXT    NOT NULL,
    seq     INTEGER NOT NULL,
    at      REAL    NOT NULL,
    kind    TEXT    NOT NULL,
    call_id TEXT,
    text    TEXT    NOT NULL,
    hash    TEXT    NOT NULL,
    salt    BLOB
);
CREATE UNIQUE INDEX records_by_place ON records (chain, seq);
-- Finds the records of a call, and lets it close only once: of its records all but *finished* differ by their hash.
CREATE UNIQUE INDEX records_by_call ON records (call_id, iif(kind = 'finished', '', hash)) WHERE call_id IS NOT NULL;

-- One chain per process that ever wrote. `settled`: closed with its last checkpoint, or given up as damaged.
CREATE TABLE chains (
    chain   TEXT    PRIMARY KEY,
    settled INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX chains_unsettled ON chains (chain) WHERE settled = 0;

-- Calls that are started and not finished, so that a start after a crash need not read the whole log.
CREATE TABLE running (
    call_id TEXT    PRIMARY KEY,
    chain   TEXT    NOT NULL,
    seq     INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE approvals (
    id            TEXT    PRIMARY KEY,
    digest        TEXT    NOT NULL,
    call_id       TEXT    NOT NULL,
    principal     TEXT    NOT NULL,
    person        TEXT,
    tool          TEXT    NOT NULL,
    summary       TEXT    NOT NULL,
    rule          TEXT    NOT NULL,
    roles         TEXT    NOT NULL,
    self_approval INTEGER NOT NULL,
    people        INTEGER NOT NULL,
    state         TEXT    NOT NULL,
    asked_at      REAL    NOT NULL,
    expires_at    REAL    NOT NULL,
    consumed_by   TEXT
);
CREATE INDEX approvals_by_digest ON approvals (digest);
CREATE INDEX approvals_by_state ON approvals (state, asked_at);
CREATE INDEX approvals_by_call ON approvals (call_id);

CREATE TABLE answers (
    approval_id TEXT    NOT NULL REFERENCES approvals (id),
    person      TEXT    NOT NULL,
    approve     INTEGER NOT NULL,
    at          REAL    NOT NULL,
    PRIMARY KEY (approval_id, person)
) WITHOUT ROWID;

CREATE TABLE keys (
    scope          TEXT NOT NULL,
    key            TEXT NOT NULL,
    request_digest TEXT NOT NULL,
    call_id        TEXT NOT NULL,
    state          TEXT NOT NULL,
    outcome        TEXT,
    at             REAL NOT NULL,
    PRIMARY KEY (scope, key)
);
CREATE INDEX keys_by_call ON keys (call_id);

CREATE TABLE pins (
    server TEXT NOT NULL,
    kind   TEXT NOT NULL,
    name   TEXT NOT NULL,
    digest TEXT NOT NULL,
    body   TEXT NOT NULL,
    by     TEXT NOT NULL,
    at     REAL NOT NULL,
    PRIMARY KEY (server, kind, name)
);

-- Payloads that may be kept, with the salts of their digests, lie apart from the log, so that they can be erased without breaking it.
CREATE TABLE payloads (
    call_id TEXT NOT NULL,
    part    TEXT NOT NULL,
    salt    BLOB NOT NULL,
    body    BLOB NOT NULL,
    PRIMARY KEY (call_id, part)
) WITHOUT ROWID;

CREATE TABLE quotas (
    scope TEXT    NOT NULL,
    day   TEXT    NOT NULL,
    used  INTEGER NOT NULL,
    PRIMARY KEY (scope, day)
) WITHOUT ROWID;
