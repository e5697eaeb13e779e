"""Servers under `https`, with certificates of an authority that only the test knows."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from counterpoint.inference import server
from counterpoint.inference.base import InferenceError, SamplingParameters
from counterpoint.inference.clients import http_sessions
from counterpoint.inference.clients.http_sessions import HttpSessions
from counterpoint.inference.config import InferenceConfig, PoolConfig
from counterpoint.inference.pool.pool import InferencePool, Served
from counterpoint.transport.files import watched
from counterpoint.transport.outages import Outages
from tests.inference.pool.test_pool import timed_out_after_a_look
from tests.inference.test_server import HEALTHY, config_of, stand_in, stop_this_process
from tests.support.fake_inference import FakeServer, weight_update
from tests.support.polling import until

SAMPLING = SamplingParameters(temperature=1.0, max_tokens=4)


@dataclass
class Identity:
    """A server's certificate for 127.0.0.1, by its own authority, which is the certificate itself."""

    certificate: Path
    key: Path

    @property
    def context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


def make_identity(directory: Path, authority: Identity | None = None, *, ended: bool = False) -> Identity:
    """Makes a certificate signed by `authority`, or by itself, which is valid for a day, or was until yesterday."""
    key = ec.generate_private_key(ec.SECP256R1())
    # Named after its directory: OpenSSL looks authorities up by their name.
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, directory.name)])
    issuer, issuer_key = name, key
    if authority is not None:
        issuer = x509.load_pem_x509_certificate(authority.certificate.read_bytes()).subject
        loaded = serialization.load_pem_private_key(authority.key.read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        issuer_key = loaded
    day = datetime.timedelta(days=1)
    ends = datetime.datetime.now(datetime.UTC) + (-day if ended else day)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(ends - 2 * day)
        .not_valid_after(ends)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
        .sign(issuer_key, hashes.SHA256())
    )
    directory.mkdir()
    (directory / "certificate.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (directory / "key.pem").write_bytes(key.private_bytes(*form))
    return Identity(directory / "certificate.pem", directory / "key.pem")


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return make_identity(tmp_path_factory.mktemp("tls") / "server")


async def test_a_pool_speaks_to_a_server_under_https(identity: Identity) -> None:
    async with FakeServer(identity.context) as fake:
        pool = InferencePool(PoolConfig(urls=[fake.url], ca_file=identity.certificate)).model("model")
        try:
            await pool.start()
            await pool.update(weight_update(3))
            turn = await pool.generate(np.arange(2, dtype=np.int32), SAMPLING, affinity="a")
        finally:
            await pool.release()
        assert fake.url.startswith("https://")
        assert (turn.policy_version, turn.completion_ids.tolist()) == (3, [3] * 4)


async def test_weights_are_sent_under_https(identity: Identity, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 10_000)
    (tmp_path / "STABLE").touch()
    async with FakeServer(identity.context) as fake:
        config = PoolConfig(urls=[fake.url], ca_file=identity.certificate, send_weights=True)
        pool = InferencePool(config).model("model")
        try:
            await pool.start()
            await pool.update(replace(weight_update(3), directory=tmp_path))
        finally:
            await pool.release()
        assert fake.versions == [3]
        assert fake.sent == (tmp_path / "model.safetensors").read_bytes()


@pytest.mark.slow
async def test_a_server_that_nobody_vouches_for_is_not_spoken_to(
    identity: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stranger = make_identity(tmp_path / "stranger")
    async with FakeServer(identity.context) as fake:
        for ca_file in (None, stranger.certificate):
            config = PoolConfig(urls=[fake.url], ca_file=ca_file, startup_timeout_seconds=60)
            pool = InferencePool(config).model("model")
            monkeypatch.setattr(pool, "until", timed_out_after_a_look(pool))
            with pytest.raises(InferenceError, match="certificate verify failed"):
                await pool.start()
            await pool.release()
        assert not fake.answers


async def test_a_certificate_that_ended_is_named_and_another_is_taken(tmp_path: Path) -> None:
    authority = make_identity(tmp_path / "authority")
    first, ended, last = (
        make_identity(tmp_path / name, authority, ended=name == "ended") for name in ("first", "ended", "last")
    )
    outages, context = Outages(), first.context
    async with FakeServer(context) as fake, following(fake, authority.certificate, outages) as pool:
        context.load_cert_chain(ended.certificate, ended.key)
        await fake.cut()
        await until(lambda: "certificate has expired" in outages.describe(), "the reason")
        context.load_cert_chain(last.certificate, last.key)
        await until(lambda: not outages.current(), "the end of the outage")
        await pool.generate(np.arange(2, dtype=np.int32), SAMPLING, affinity="a")


async def test_another_authority_is_taken_while_a_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also by model calls and weights that are sent; a file that is written at the moment changes nothing."""
    old, new = make_identity(tmp_path / "old"), make_identity(tmp_path / "new")
    authorities = tmp_path / "ca.pem"
    authorities.write_bytes(old.certificate.read_bytes())
    (tmp_path / "STABLE").touch()
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    outages, context = Outages(), old.context
    async with FakeServer(context) as fake, following(fake, authorities, outages, send_weights=True) as pool:
        authorities.write_bytes(b"no certificate")
        await until(lambda: "stays in use" in caplog.text, "a complaint")
        await pool.generate(np.arange(2, dtype=np.int32), SAMPLING, affinity="a")
        context.load_cert_chain(new.certificate, new.key)
        await fake.cut()
        await until(lambda: "certificate verify failed" in outages.describe(), "the reason")
        authorities.write_bytes(new.certificate.read_bytes())
        await until(lambda: not outages.current(), "the end of the outage")
        await pool.update(replace(weight_update(3), directory=tmp_path))
        turn = await pool.generate(np.arange(2, dtype=np.int32), SAMPLING, affinity="a")
        assert turn.policy_version == 3


@asynccontextmanager
async def following(
    fake: FakeServer, authorities: Path, outages: Outages, send_weights: bool = False
) -> AsyncIterator[Served]:
    """A pool of one server, which looks often at it and at its files."""
    config = PoolConfig(
        urls=[fake.url],
        ca_file=authorities,
        send_weights=send_weights,
        health_interval_seconds=0.02,
        startup_timeout_seconds=60,
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in (watched, http_sessions):
            patch.setattr(module, "LOOK_SECONDS", 0.02)
        pool = InferencePool(config, outages=outages).model("model")
        try:
            await pool.start()
            yield pool
        finally:
            await pool.release()


async def test_certificates_are_read_only_for_servers_under_https(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[None] = []
    load = ssl.SSLContext.load_default_certs

    def counted(context: ssl.SSLContext, purpose: ssl.Purpose) -> None:
        read.append(None)
        load(context, purpose)

    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", counted)
    async with HttpSessions(PoolConfig()) as connections:
        for url in ("http://127.0.0.1:1", "http://127.0.0.1:2"):
            connections.binary_client(url)
        assert not read
        for url in ("https://127.0.0.1:1", "HTTPS://127.0.0.1:2"):
            connections.binary_client(url)
        assert len(read) == 1


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_what_holds_no_certificates_is_refused_by_name(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "ca.pem"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"ca_file = '.*ca\.pem': .*PEM"):
        HttpSessions(PoolConfig(ca_file=path))


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_authorities_may_have_comments_in_any_encoding(tmp_path: Path, identity: Identity, encoding: str) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes("# Főtanúsítvány, Autorité\n".encode(encoding, "replace") + identity.certificate.read_bytes())
    HttpSessions(PoolConfig(ca_file=path))


@pytest.mark.slow
def test_a_server_of_ours_may_have_a_certificate(
    identity: Identity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrapped = f"""
import http.server, ssl
class Secure(http.server.HTTPServer):
    def server_activate(self):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain({str(identity.certificate)!r}, {str(identity.key)!r})
        self.socket = context.wrap_socket(self.socket, server_side=True)
        super().server_activate()
"""
    stand_in(monkeypatch, wrapped + HEALTHY.replace("http.server.HTTPServer(", "Secure("))
    arguments = ["--ssl-certfile", str(identity.certificate), "--ssl-keyfile", str(identity.key)]
    config = config_of(tmp_path, {}, extra_args=arguments)
    with caplog.at_level("INFO"):
        assert server.serve(config, stop_this_process) == 143
    assert f"vLLM is ready on https://127.0.0.1:{config.port}" in caplog.text
    for flag in ("--ssl-certfile=c", "--ssl_certfile=c"):
        assert InferenceConfig(model="m", extra_args=[flag]).scheme == "https"
