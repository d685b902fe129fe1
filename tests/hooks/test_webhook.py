"""Records posted to an address: signed in a form that others can check, and to that address alone."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from typing import Any

import pytest

from ringfence.core.errors import Refused, Unavailable
from ringfence.core.model import HookSpec
from ringfence.core.secret import Secret
from ringfence.hooks.delivery import HookFailed
from ringfence.hooks.webhook import WebhookHook
from ringfence.secrets.signing import signed_headers
from tests.hooks.receiver import receiving

pytestmark = pytest.mark.anyio

VALUE = "a-long-enough-signing-key"
RECORDS = [{"id": "c:1", "record": {"status": "success"}}, {"id": "c:2", "record": {"status": "denied"}}]


def hook(url: str, **more: Any) -> WebhookHook:
    async def secret() -> Secret:
        return Secret("key", VALUE)

    return WebhookHook(HookSpec("siem", url=url, secret="key", **more), secret)


def test_signatures_are_those_of_standard_webhooks() -> None:
    """The example of its specification."""
    secret = Secret("key", "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    made = signed_headers(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330.9, b'{"test": 2432232314}')
    assert made == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


@pytest.mark.parametrize(
    ("value", "says"),
    [("whsec_!!!!!!!!", "has no base64"), ("whsec_c2hvcnQ=", "too short"), ("fourteen-chars", "too short")],
)
def test_a_key_that_proves_nothing_is_refused(value: str, says: str) -> None:
    with pytest.raises(Unavailable, match=says):
        signed_headers(Secret("key", value), "id", 0.0, b"")


async def test_what_is_posted_can_be_checked_with_the_key_alone() -> None:
    with receiving() as server:
        await hook(server.url).take(RECORDS)
    ((path, headers, body),) = server.got
    assert path == "/hook"
    assert json.loads(body) == {"type": "ringfence.calls_ended", "hook": "siem", "records": RECORDS}
    signed = b".".join((headers["webhook-id"].encode(), headers["webhook-timestamp"].encode(), body))
    wanted = base64.b64encode(hmac.new(VALUE.encode(), signed, hashlib.sha256).digest()).decode()
    assert headers["webhook-signature"] == f"v1,{wanted}"
    assert headers["webhook-id"] == "c:1+2"


@pytest.mark.parametrize("status", [302, 400, 500])
async def test_any_other_answer_than_success_is_a_failure_and_nothing_is_followed(status: int) -> None:
    with receiving(status) as server:
        with pytest.raises(HookFailed, match=f"it answered {status}"):
            await hook(server.url).take(RECORDS)
        assert len(server.got) == 1


async def test_an_address_where_nobody_is_is_a_failure() -> None:
    with receiving() as server:
        url = server.url
    with pytest.raises(HookFailed, match="it cannot be reached"):
        await hook(url).take(RECORDS)


async def test_a_name_that_leads_into_this_machine_is_refused() -> None:
    with receiving() as server:
        url = server.url.replace("127.0.0.1", "localhost")
        with pytest.raises(Refused, match="no rule names the address"):
            await hook(url).take(RECORDS)
        await hook(url, addresses=("127.0.0.0/8", "::1/128")).take(RECORDS)
    assert len(server.got) == 1
