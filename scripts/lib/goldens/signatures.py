"""Write tests/golden/signatures: folders that OpenSSF's model_signing has signed, with the public keys.

The keys are derived from fixed numbers and sign deterministically, so that the files do not change.
"""

import os
import shutil
import sys

# The order of ignored paths in a signature depends on the hashes of their names.
if os.environ.get("PYTHONHASHSEED") != "0":
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, sys.orig_argv)

import tempfile
from pathlib import Path

import model_signing
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from model_signing._signing import sign_ec_key

from lib import GOLDEN

CURVES = {"p256": ec.SECP256R1(), "p384": ec.SECP384R1()}
# The order of paths is not that of their texts: `a/b.txt` precedes `a-b.txt`.
FILES = {"config.json": "{}\n", "a-b.txt": "first\n", "a/b.txt": "second\n", "a/c/empty.txt": "", ".gitattributes": "# not signed\n"}


class Deterministic(ec.ECDSA):
    """ECDSA with nonces from the message (RFC 6979)."""

    def __init__(self, algorithm):
        super().__init__(algorithm, deterministic_signing=True)


sign_ec_key.ec.ECDSA = Deterministic

out = GOLDEN / "signatures"
shutil.rmtree(out, ignore_errors=True)
for number, (name, curve) in enumerate(CURVES.items()):
    folder = out / name
    for file, text in FILES.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text)
    key = ec.derive_private_key(20261126 + number, curve)
    (out / f"{name}.pub.pem").write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    with tempfile.TemporaryDirectory() as scratch:
        private = Path(scratch, "key.pem")
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        hashing = model_signing.hashing.Config().set_ignored_paths(paths=[folder / "model.sig"], ignore_git_paths=True)
        signing = model_signing.signing.Config().use_elliptic_key_signer(private_key=private).set_hashing_config(hashing)
        signing.sign(folder, folder / "model.sig")
print(out)
