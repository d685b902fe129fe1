-- Bearer tokens. Of a token only the SHA-256 of its secret is kept, which stands for 256 random bits and says nothing of them.
CREATE TABLE tokens (
    id         TEXT    PRIMARY KEY,
    digest     TEXT    NOT NULL,
    kind       TEXT    NOT NULL,
    name       TEXT    NOT NULL,
    tenant     TEXT    NOT NULL,
    made_by    TEXT    NOT NULL,
    made_at    REAL    NOT NULL,
    expires_at REAL    NOT NULL,
    revoked_at REAL
) WITHOUT ROWID;
