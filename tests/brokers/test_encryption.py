"""Brokers behind TLS: by the scheme of the address, with certificates that are checked, and never without."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from holdfast.brokers.engine import BrokerUnavailable, Engine
from holdfast.brokers.engines import engine_of
from holdfast.errors import ConfigurationError
from servers.nats import NatsServer
from servers.rabbitmq import RabbitmqServer
from servers.valkey import ValkeyServer
from tests.brokers.messages import interest, outgoing, sent, taken


class Certificate(NamedTuple):
    certificate: Path
    key: Path


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """One that this machine trusts only where it is named."""
    folder = tmp_path_factory.mktemp("certificates")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.now(UTC) - timedelta(days=1))
        .not_valid_after(datetime.now(UTC) + timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    found = Certificate(folder / "certificate.pem", folder / "key.pem")
    found.certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    found.key.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return found


@contextlib.asynccontextmanager
async def encrypted(port: int, certificate: Certificate) -> AsyncIterator[int]:
    """A port that encrypts what another one does not."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    copying: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", port)
        for one, other in ((reader, back), (there, writer)):
            copying.add(asyncio.create_task(copy(one, other)))

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while some := await reader.read(65536):
                    writer.write(some)
                    await writer.drain()
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in copying:
            task.cancel()
        await asyncio.gather(*copying, return_exceptions=True)


@contextlib.asynccontextmanager
async def served(name: str, folder: Path, certificate: Certificate) -> AsyncIterator[str]:
    """The address of a broker behind TLS, without options."""
    match name:
        case "nats":
            tls = f'tls {{\n  cert_file: "{certificate.certificate}"\n  key_file: "{certificate.key}"\n}}'
            with NatsServer(folder, tls) as nats:
                yield f"tls://127.0.0.1:{nats.port}"
        case "redis":
            with ValkeyServer(folder) as valkey:
                async with encrypted(valkey.port, certificate) as port:
                    yield f"rediss://127.0.0.1:{port}"
        case _:
            with RabbitmqServer(folder) as rabbitmq:
                async with encrypted(rabbitmq.port, certificate) as port:
                    yield f"amqps://guest:guest@127.0.0.1:{port}/"


async def connected(engine: Engine) -> None:
    sink = engine.sink(lease=30)
    try:
        await sink.open()
    finally:
        await sink.close()


async def carried(engine: Engine) -> None:
    """Have an event go through a broker."""
    source, sink = engine.source(interest(), lease=30), engine.sink(lease=30)
    try:
        await source.open()
        await sink.open()
        await sent(sink, [outgoing(1)])
        await taken(source, 1)
    finally:
        await source.close()
        await sink.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nats", "redis", "rabbitmq"])
async def test_certificates_are_checked(name: str, tmp_path: Path, certificate: Certificate) -> None:
    """Events go through with the certificate in `cafile`; without it the broker is not believed (SEC-1, SCL-2)."""
    async with served(name, tmp_path / "server", certificate) as address:
        await carried(engine_of(f"{address}?cafile={certificate.certificate}"))
        with pytest.raises(BrokerUnavailable, match=r"(?i)certificate"):
            await connected(engine_of(address))


@pytest.mark.parametrize(
    ("scheme", "said"), [("tls", b'INFO {"server_id":"x","version":"2.12.0"}\r\n'), ("rediss", b"")]
)
async def test_no_password_goes_to_a_server_that_does_not_encrypt(scheme: str, said: bytes) -> None:
    """Whoever sits in between cannot talk a worker out of encrypting (SEC-1)."""
    heard, ended = bytearray(), asyncio.Event()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        with contextlib.suppress(OSError):
            while some := await reader.read(65536):
                heard.extend(some)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(listen, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(BrokerUnavailable, match=r"tls://|by TLS"):
            await connected(engine_of(f"{scheme}://me:geheim@127.0.0.1:{port}"))
        await asyncio.wait_for(ended.wait(), 10)
    assert b"geheim" not in heard


@pytest.mark.parametrize(
    "address",
    [
        *(f"{scheme}://h?cafile=/no/such" for scheme in ("tls", "rediss", "amqps", "kafkas")),
        "nats://h?creds=/no/such",
        f"tls://h?cafile={Path(__file__)}",
    ],
)
def test_files_that_cannot_be_read_are_named(address: str) -> None:
    """Before anything connects (SCL-2)."""
    with pytest.raises(ConfigurationError, match=r"(cafile|creds)=.*(No such file|certificate|PEM|NO_)"):
        engine_of(address)
