"""The files for TLS between a process and NATS."""

import ssl
from pathlib import Path

import msgspec

from tensorhub_common.errors import RegistryUnavailable


class TlsFiles(msgspec.Struct, frozen=True):
    """Whom to believe that it is our NATS, and, where the server wants to know, who we are."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Read the files. Raises `RegistryUnavailable`."""
        try:
            context = ssl.create_default_context(cafile=str(self.ca))
            if self.certificate is not None:
                context.load_cert_chain(self.certificate, self.key)
        except OSError as why:
            files = ", ".join(str(each) for each in (self.ca, self.certificate, self.key) if each is not None)
            raise RegistryUnavailable(
                f"the files for TLS ({files}) can't be used: {why}. They must be PEM, and a key its certificate's own"
            ) from None
        return context
