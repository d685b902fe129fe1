"""Who calls, and who may answer."""

from ringfence.core.model import IssuedToken
from ringfence.identity.directory import Directory
from ringfence.identity.local import (
    LOCAL_AGENT,
    TOKEN,
    agent_of,
    as_principal,
    known_token,
    local_agent,
    local_token,
    os_user,
    person_of,
)
from ringfence.identity.peers import peer_uid
from ringfence.identity.tokens import NotAdmitted, TokenCheck, new_token

__all__ = [
    "LOCAL_AGENT",
    "TOKEN",
    "Directory",
    "IssuedToken",
    "NotAdmitted",
    "TokenCheck",
    "agent_of",
    "as_principal",
    "known_token",
    "local_agent",
    "local_token",
    "new_token",
    "os_user",
    "peer_uid",
    "person_of",
]
