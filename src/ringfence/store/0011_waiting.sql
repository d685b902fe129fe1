-- Which questions wait, and for which tenant, is read from the index alone: what people are shown of each may be a
-- megabyte, which would be passed over for every row.
DROP INDEX approvals_by_state;
CREATE INDEX approvals_by_state ON approvals (state, asked_at, expires_at, principal, id);
