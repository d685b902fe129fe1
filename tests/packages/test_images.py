"""Registries that lie, and registries that want to know who asks: nothing is kept that is not what its digest says,
nobody else is reached, and no box has a password."""

from __future__ import annotations

import base64
import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ringfence.compose import packages
from ringfence.core.errors import Unavailable
from ringfence.egress.dial import Streams, system_dial
from ringfence.egress.tls import Authority
from ringfence.governance.route import ProxyServer
from ringfence.packages.images import manifests
from tests.boxing import boxes_run
from tests.packages.hostile import INDEX, Answer, Fake, digest_of, fetch, refused, serving
from tests.packages.images import layer

pytestmark = pytest.mark.anyio
SMALL = layer(("x", "1"))
PASSWORD = "correct-horse-battery"


# ── Lies ──────────────────────────────────────────────────────────────────────────────────────────


async def test_an_honest_answer_is_taken(fake: Fake, tmp_path: Path) -> None:
    digest = fake.say(fake.image(SMALL, config={"Entrypoint": ["/x"], "Env": ["A=1", "no name=2"], "WorkingDir": "w"}))
    tree = await fetch(tmp_path, fake)
    assert tree.packages[0].integrity == digest
    assert (tree.folder / "x").read_text() == "1"
    assert tree.about == {"entrypoint": ["/x"], "cmd": [], "env": {"A": "1"}, "cwd": "/w", "user": "", "left_out": {}}


async def test_an_index_leads_to_the_manifest_for_this_machine(fake: Fake, tmp_path: Path) -> None:
    inner = json.dumps(fake.image(SMALL)).encode()
    fake.say(inner, "inner")
    here = {"os": "linux", "architecture": manifests.machine()}
    other = {"digest": digest_of(b""), "size": 0, "platform": {**here, "architecture": "pdp11"}}
    listed = [other, {"digest": digest_of(inner), "size": len(inner), "platform": here}]
    fake.say({"schemaVersion": 2, "mediaType": INDEX, "manifests": listed})
    assert (await fetch(tmp_path, fake)).packages[0].integrity == digest_of(inner)
    fake.say({"schemaVersion": 2, "mediaType": INDEX, "manifests": [other]})
    await _not_again(fake, tmp_path, "it is for: linux/pdp11")


async def _not_again(fake: Fake, tmp_path: Path, why: str) -> None:
    with pytest.raises(Unavailable, match=why):
        await fetch(tmp_path, fake)


async def test_another_manifest_than_the_pinned_one(fake: Fake, tmp_path: Path) -> None:
    asked = digest_of(b"another")
    fake.answers[f"/v2/it/manifests/{asked}"] = Answer(json.dumps(fake.image(SMALL)).encode())
    await refused(tmp_path, fake, "not what the registry says", f"it@{asked}")


async def test_an_index_that_leads_to_another_manifest(fake: Fake, tmp_path: Path) -> None:
    asked = digest_of(b"another")
    fake.answers[f"/v2/it/manifests/{asked}"] = Answer(json.dumps(fake.image(SMALL)).encode())
    here = {"os": "linux", "architecture": manifests.machine()}
    fake.say({"schemaVersion": 2, "mediaType": INDEX, "manifests": [{"digest": asked, "size": 1, "platform": here}]})
    await refused(tmp_path, fake, "not what the registry says")


async def test_a_layer_of_other_bytes(fake: Fake, tmp_path: Path) -> None:
    told = fake.image(SMALL)
    honest = gzip.compress(SMALL, 1)
    told["layers"] = [fake.blob(gzip.compress(layer(("x", "2")), 1)[: len(honest)], told=honest)]
    told["layers"][0]["size"] = len(honest)
    fake.say(told)
    await refused(tmp_path, fake, "not what the registry says|was not received")


async def test_a_configuration_of_other_bytes(fake: Fake, tmp_path: Path) -> None:
    told = fake.image(SMALL)
    fake.answers[f"/v2/it/blobs/{told['config']['digest']}"] = Answer(b"{}".ljust(told["config"]["size"]))
    fake.say(told)
    await refused(tmp_path, fake, "not what the registry says")


@pytest.mark.parametrize(("change", "why"), [(-1, "more than the"), (1, "not what the registry says")])
async def test_a_manifest_that_lies_about_a_size(fake: Fake, tmp_path: Path, change: int, why: str) -> None:
    told = fake.image(SMALL)
    told["layers"][0]["size"] += change
    fake.say(told)
    await refused(tmp_path, fake, why)


async def test_a_blob_that_ends_before_its_end(fake: Fake, tmp_path: Path) -> None:
    told = fake.image(SMALL)
    path = f"/v2/it/blobs/{told['layers'][0]['digest']}"
    whole = fake.answers[path].body
    fake.answers[path] = Answer(whole[:-5], length=len(whole))
    fake.say(told)
    await refused(tmp_path, fake, "was not received|not what the registry says")


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"schemaVersion": 1, "fsLayers": [], "history": []}, "schema 1"),
        ({"schemaVersion": 2, "mediaType": INDEX, "manifests": [], "layers": []}, "are one"),
        ({"schemaVersion": 2, "manifests": {}}, "are one"),
        ({"schemaVersion": 2, "config": {"mediaType": "a/b"}, "layers": [1]}, "of another kind"),
        (b'{"schemaVersion": 2, "schemaVersion": 2}', "no JSON"),
        (b"[" * 100_000, "no JSON"),
        (b"[]", "no mapping"),
        (b'"' + b"x" * 5_000_000 + b'"', "more than the"),
    ],
)
async def test_what_is_no_manifest(fake: Fake, tmp_path: Path, told: Any, why: str) -> None:
    fake.say(told)
    await refused(tmp_path, fake, why)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"digest": "sha256:../../x"}, "no sha256"),
        ({"digest": "md5:00"}, "no sha256"),
        ({"size": -1}, "no size"),
        ({"size": 2**70}, "no size"),
        ({"size": True}, "no size"),
        ({"mediaType": "application/vnd.oci.image.layer.nondistributable.v1.tar"}, "not taken"),
        ({"urls": ["https://elsewhere.example/x"]}, "not taken"),
        ({"mediaType": ["application/vnd.oci.image.layer.v1.tar"]}, "not taken"),
    ],
)
async def test_a_layer_that_cannot_be(fake: Fake, tmp_path: Path, change: dict[str, Any], why: str) -> None:
    told = fake.image(SMALL)
    told["layers"][0] |= change
    fake.say(told)
    await refused(tmp_path, fake, why)


async def test_an_image_for_another_machine(fake: Fake, tmp_path: Path) -> None:
    told = fake.image(SMALL)
    told["config"] = fake.blob(b'{"os": "linux", "architecture": "pdp11"}', kind=told["config"]["mediaType"])
    fake.say(told)
    await refused(tmp_path, fake, "it is for linux/pdp11")


# ── Elsewhere ─────────────────────────────────────────────────────────────────────────────────────


async def test_who_sends_us_to_another_host_without_tls_is_not_followed(fake: Fake, tmp_path: Path) -> None:
    with serving() as elsewhere:
        told = fake.image(SMALL)
        path = f"/v2/it/blobs/{told['layers'][0]['digest']}"
        elsewhere.answers[path] = fake.answers[path]
        fake.answers[path] = Answer(status=307, headers=(("Location", f"{elsewhere.url}{path}"),))
        fake.say(told)
        await refused(tmp_path, fake, "not over TLS")
        assert elsewhere.asked == []


@pytest.mark.parametrize(
    "host",
    ["localhost:{port}", "127.0.0.1:{port}", "[::1]:{port}", "2130706433:{port}", "*.example", "a@b.example", "1.2"],
)
async def test_who_sends_us_to_this_machine_or_an_address_is_not_followed(
    fake: Fake, tmp_path: Path, host: str
) -> None:
    with serving(Authority()) as elsewhere:
        place = f"https://{host.format(port=elsewhere.port)}/x"
        fake.answers["/v2/it/manifests/1"] = Answer(status=302, headers=(("Location", place),))
        await refused(tmp_path, fake, "not followed|no address")
        assert elsewhere.asked == []


async def test_who_sends_us_to_a_name_of_an_inner_address_is_not_followed(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def resolve(_: str) -> list[str]:
        return ["10.0.0.1"]

    monkeypatch.setattr(packages, "ProxyServer", partial(ProxyServer, resolve=resolve))
    fake.answers["/v2/it/manifests/1"] = Answer(status=302, headers=(("Location", "https://inner.example/x"),))
    await refused(tmp_path, fake, "refused a connection to inner.example:443")


async def test_a_redirect_to_itself_over_and_over(fake: Fake, tmp_path: Path) -> None:
    fake.answers["/v2/it/manifests/1"] = Answer(status=302, headers=(("Location", "/v2/it/manifests/1"),))
    await refused(tmp_path, fake, "one redirect after the other")
    assert len(fake.asked) < 10


async def test_blobs_may_be_had_from_whom_the_registry_names(
    own_engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness plays the outside: what is dialled at a public address is one of its own listeners."""

    async def resolve(_: str) -> list[str]:
        return ["93.184.215.14"]

    async def dial(_: str, port: int, tls: Any, name: str | None) -> Streams:
        return await system_dial("127.0.0.1", port, tls, name)

    monkeypatch.setattr(packages, "ProxyServer", partial(ProxyServer, resolve=resolve, dial=dial))
    authority = Authority()
    with serving(authority) as registry, serving(authority, "store.example") as store:
        trust(own_engines, registry)
        told = registry.image(SMALL)
        path = f"/v2/it/blobs/{told['layers'][0]['digest']}"
        store.answers["/there"] = registry.answers[path]
        place = f"https://store.example:{store.port}/there?signed=1"
        registry.answers[path] = Answer(status=307, headers=(("Location", place),))
        registry.say(told)
        tree = await fetch(tmp_path, registry)
        assert (tree.folder / "x").read_text() == "1"
        assert store.asked == [("/there?signed=1", "")]


# ── Who asks ──────────────────────────────────────────────────────────────────────────────────────


def trust(folder: Path, fake: Fake) -> None:
    assert fake.tls is not None
    place = folder / "config/containers/certs.d" / fake.host
    place.mkdir(parents=True)
    (place / "ca.crt").write_bytes(fake.tls.pem)


def log_in(folder: Path, fake: Fake) -> str:
    auth = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    (folder / "config.json").write_text(json.dumps({"auths": {fake.host: {"auth": auth}}}))
    return f"Basic {auth}"


async def test_a_token_for_whoever_asks(fake: Fake, tmp_path: Path) -> None:
    fake.wants, fake.challenge = "Bearer t0ken", f'Bearer realm="{fake.url}/token",service="it",scope="everything"'
    fake.answers["/token"] = Answer(b'{"token": "t0ken"}')
    fake.say(fake.image(SMALL))
    await fetch(tmp_path, fake)
    (asked,) = {path for path, _ in fake.asked if path.startswith("/token")}
    assert asked == "/token?service=it&scope=repository%3Ait%3Apull"


async def test_a_token_from_elsewhere_without_tls(fake: Fake, tmp_path: Path) -> None:
    with serving() as elsewhere:
        fake.wants, fake.challenge = "Bearer t", f'Bearer realm="{elsewhere.url}/token"'
        await refused(tmp_path, fake, "not over TLS")
        assert elsewhere.asked == []


@pytest.mark.parametrize("token", [True, False])
async def test_a_password_is_put_in_on_the_way_and_is_in_no_box(
    own_engines: Path, monkeypatch: pytest.MonkeyPatch, token: bool
) -> None:
    seen = boxes_run(monkeypatch)
    with serving(Authority()) as fake:
        trust(own_engines, fake)
        basic = log_in(own_engines, fake)
        fake.wants, fake.challenge = (
            ("Bearer t0ken", f'Bearer realm="{fake.url}/token",service="it"') if token else (basic, 'Basic realm="it"')
        )
        fake.answers["/token"] = Answer(b'{"access_token": "t0ken"}')
        fake.say(fake.image(SMALL))
        tree = await fetch(own_engines, fake)
        presented = {who for path, who in fake.asked if path.startswith("/token") == token and who}
        assert presented == {basic}
        assert (tree.folder / "x").read_text() == "1"
    assert seen and not any(PASSWORD in str(spec) or basic in str(spec) for spec in seen)
    kept = (path for path in (own_engines / "state").rglob("*") if path.is_file())
    assert not any(PASSWORD.encode() in path.read_bytes() for path in kept)


async def test_a_password_is_never_sent_in_the_clear(fake: Fake, own_engines: Path) -> None:
    basic = log_in(own_engines, fake)
    fake.wants, fake.challenge = basic, 'Basic realm="it"'
    fake.say(fake.image(SMALL))
    text = await refused(own_engines, fake, "plain HTTP")
    assert PASSWORD not in text and not any(who for _, who in fake.asked)


async def test_who_is_not_known_is_told_so(own_engines: Path) -> None:
    with serving(Authority()) as fake:
        trust(own_engines, fake)
        fake.wants, fake.challenge = "Basic x", 'Basic realm="it"'
        await refused(own_engines, fake, "wants to know who asks")


async def test_a_registry_that_nobody_vouches_for(own_engines: Path, tmp_path: Path) -> None:
    with serving(Authority()) as fake, serving(Authority()) as other:
        trust(own_engines, fake)
        (own_engines / "config/containers/certs.d" / fake.host / "ca.crt").write_bytes(other.tls.pem)  # type: ignore[union-attr]
        fake.say(fake.image(SMALL))
        await refused(tmp_path, fake, "was not received")
