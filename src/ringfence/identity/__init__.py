"""Who calls, and who may answer."""

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

__all__ = [
    "LOCAL_AGENT",
    "TOKEN",
    "agent_of",
    "as_principal",
    "known_token",
    "local_agent",
    "local_token",
    "os_user",
    "peer_uid",
    "person_of",
]
