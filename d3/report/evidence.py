"""What a report is made from: a certificate and the boots beside it, read and checked against its digests."""

from pathlib import Path

from d3.certificate import folder_of, load
from d3.classify import check_boot
from d3.errors import D3Error
from d3.record import Boot, Frozen, sha256
from d3.schema import Certificate, digest
from d3.store import root
from d3.verify import read_artifact, read_boot


class Evidence(Frozen):
    """A certificate with its boots, in the certificate's order."""

    certificate: Certificate
    boots: tuple[Boot, ...]

    def counted(self, stratum: str) -> list[Boot]:
        """The boots of a stratum whose answers count."""
        entries = zip(self.certificate.boots, self.boots, strict=True)
        return [boot for entry, boot in entries if entry.counted and entry.stratum == stratum]


def read_certificate(path: Path) -> Certificate:
    """A certificate whose content has its digest. Raises D3Error where it is missing, damaged or was changed."""
    found = load(path)
    if digest(found) != found.digest:
        raise D3Error(f"{path}: its content does not have its digest", f"see what changed: {_verify(path)}")
    return found


def read(path: Path) -> Evidence:
    """A certificate and its boots. Raises D3Error that names the first file that is missing, damaged or changed."""
    certificate, folder = read_certificate(path), folder_of(path)
    if not folder.is_dir():
        raise D3Error(f"{folder} does not exist", "the folder of artifacts belongs beside the certificate")
    boots = []
    for entry in certificate.boots:
        for artifact in (entry.record, entry.responses):
            try:
                found = sha256(read_artifact(folder, artifact.path))
            except D3Error as error:
                raise D3Error(f"{folder}: {error.message}", f"see what else is: {_verify(path)}") from error
            if found != artifact.sha256:
                raise D3Error(f"{folder / artifact.path} was changed", f"see what else was: {_verify(path)}")
        boot = read_boot(folder, entry)
        check_boot(certificate.registration, boot)
        boots.append(boot)
    return Evidence(certificate=certificate, boots=tuple(boots))


def shown(path: Path) -> str:
    """A certificate's path as a reader in the project folder types it; elsewhere its name alone."""
    full = path.resolve()
    return full.relative_to(root()).as_posix() if full.is_relative_to(root()) else full.name


def _verify(path: Path) -> str:
    return f"python -m d3.verify {path}"
