"""Keys: certificates that are let through, keys that others may read, revocations that are forgotten."""

from dataclasses import replace

from mutants.seed import Mutant

FILES, CONNECTIONS, LISTS, COMMANDS = (
    f"tests/unit/test_{name}.py" for name in ("identity", "credentials", "revocations", "keys")
)
TESTS = [FILES, CONNECTIONS, LISTS, COMMANDS]

IDENTITY, CREDENTIALS, REVOCATIONS, RUN_KEYS, KEY_FILES = (
    f"link/net/{name}.py" for name in ("identity", "credentials", "revocations", "run_keys", "key_files")
)

STRANGERS = [
    Mutant("clients need no certificate", CREDENTIALS, "require_client_auth=True", "require_client_auth=False"),
    Mutant("any seat of the run may answer", CREDENTIALS, '[("grpc.ssl_target_name_override", revocations.accepted(peer).host_name)]', '[("grpc.ssl_target_name_override", "worker-1-0.x-1a2b3c4d.atoll")]'),
    Mutant("a revoked server is dialled", CREDENTIALS, "revocations.accepted(peer).host_name", "peer.host_name"),
    Mutant("a revoked caller is let in", CREDENTIALS, "        if self.revocations.has(bearer):\n", "        if False:\n"),
    Mutant("a caller of another run is let in", CREDENTIALS, "        if bearer.run != self._run:\n", "        if False:\n"),
    Mutant("a caller's certificate may expire while it is connected", CREDENTIALS, "        if problem := certificate.clock_fault(now):\n", '        if problem := "":\n'),
    Mutant("an observer may do all that a worker may", CREDENTIALS, "        if bearer.role not in allowed:\n", "        if False:\n"),
    Mutant("an older list of revocations takes the place of a newer one", CREDENTIALS, "            taken = revocations.includes(self.revocations)\n", "            taken = True\n"),
    Mutant("only the first of a server's identities is shown", CREDENTIALS, "for one in (identity, *others)]", "for one in (identity,)]"),
    Mutant("a refusal has as many lines as the peer likes", CREDENTIALS, '" ".join((error.details() or "").split())', '(error.details() or "")'),
    Mutant("a refusal is as long as the peer likes", CREDENTIALS, "{details[:_LONGEST]}\", code, worker)", "{details}\", code, worker)"),
    Mutant("every lost connection is a refusal", CREDENTIALS, '    if "Socket closed" not in details and "reset by peer" not in details:\n        return None\n', ""),
    Mutant("a caller does not look at its own expired certificate", CREDENTIALS, "    if problem := own.clock_fault():\n", '    if problem := "":\n'),
    Mutant("strangers fill the log", "link/net/__init__.py", 'os.environ.setdefault("GRPC_VERBOSITY", "NONE")\n', ""),
]  # fmt: skip

CERTIFICATES = [
    Mutant("a registry's certificate dials too", IDENTITY, '"registry": (ExtendedKeyUsageOID.SERVER_AUTH,)', '"registry": (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)'),
    Mutant("an observer's certificate serves too", IDENTITY, '"observer": (ExtendedKeyUsageOID.CLIENT_AUTH,)', '"observer": (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH)'),
    Mutant("a renewed seat is unknown to those that have not heard of the revocation", IDENTITY, "for each in range(generation + 1)]", "for each in range(generation, generation + 1)]"),
    Mutant("every certificate has the names of later generations", IDENTITY, "for each in range(generation + 1)]", "for each in range(generation + 2)]"),
    Mutant("a certificate outlives the authority", IDENTITY, "        if ends[1] > self.valid_until:\n", "        if False:\n"),
    Mutant("clocks that are behind refuse a new certificate", IDENTITY, "ends = start or begin - _BACKDATED, begin", "ends = start or begin, begin"),
    Mutant("a seat has several names", IDENTITY, "-(0|[1-9][0-9]{{0,5}})-", "-([0-9]{{1,6}})-"),
    Mutant("a generation makes another bearer", IDENTITY, "generation: int = field(default=0, compare=False)", "generation: int = field(default=0)"),
    Mutant("a run may have any name", IDENTITY, "        if not re.fullmatch(_RUN, run, re.ASCII):\n", "        if False:\n"),
    Mutant("keys are printed with an identity", IDENTITY, "    key: bytes = field(repr=False)\n", "    key: bytes\n"),
]  # fmt: skip

BUNDLES = [
    Mutant("a key of another certificate is loaded", IDENTITY, "        if own != parsed.public_key():\n", "        if False:\n"),
    Mutant("a certificate of another authority is loaded", IDENTITY, "            parsed.verify_directly_issued_by(authority)\n", "            pass\n"),
    Mutant("an expired bundle is loaded", IDENTITY, "        if problem := known.clock_fault(now):\n", '        if problem := "":\n'),
    Mutant("keys that others may read are used", KEY_FILES, "found.st_mode & _OPEN:", "False:"),
    Mutant("keys that the group may read are used", KEY_FILES, "_OPEN = stat.S_IRWXG | stat.S_IRWXO", "_OPEN = stat.S_IRWXO"),
    Mutant("new keys are open to others", KEY_FILES, "os.open(name, flags, 0o600)", "os.open(name, flags, 0o666)"),
    Mutant("renewed keys are open to others", KEY_FILES, "write_atomically(folder / name, content, mode=0o600)", "write_atomically(folder / name, content)"),
    Mutant("folders of keys are open to others", KEY_FILES, "exist_ok=True, mode=0o700)", "exist_ok=True)"),
    Mutant("keys are overwritten", KEY_FILES, "        if replace:\n", "        if True:\n"),
    Mutant("files of keys may have any size", KEY_FILES, "        return read_limited(path, most)\n", "        return path.read_bytes()\n"),
]  # fmt: skip

REVOKED = [
    Mutant("anybody may sign revocations", REVOCATIONS, "            key.verify(signature, body, ec.ECDSA(hashes.SHA256()))\n", ""),
    Mutant("a list of another run counts", REVOCATIONS, "        if run != (own := common_name(authority)):\n", "        if (own := common_name(authority)) == '':\n"),
    Mutant("a list may have any length", REVOCATIONS, "        if len(content) > LONGEST:\n", "        if False:\n"),
    Mutant("a seat may be listed twice", REVOCATIONS, "        if seat in least:\n", "        if False:\n"),
    Mutant("renewed certificates are revoked too", REVOCATIONS, "return bearer.generation < self.least", "return bearer.generation <= self.least"),
    Mutant("a second revocation of a seat does nothing", REVOCATIONS, "before.accepted(bearer).generation + 1}", "1}"),
    Mutant("a revocation forgets those before it", REVOCATIONS, "least = {**before.least, (bearer.role", "least = {(bearer.role"),
    Mutant("a list that is a link to nowhere is no list", REVOCATIONS, "if not os.path.lexists(path):", "if not path.exists():"),
    Mutant("lists of two runs are compared", REVOCATIONS, "return self.run == other.run and all(", "return all("),
]  # fmt: skip

KEYS = [
    Mutant("a renewed certificate stays revoked", RUN_KEYS, "generation = known.accepted(bearer).generation\n", "generation = 0\n"),
    Mutant("a worker starts with a revoked bundle", REVOCATIONS, "    if known.has(identity.bearer):\n", "    if False:\n"),
    Mutant("a seat that was just made lacks the next list", RUN_KEYS, "            if bundle not in self._bundles:\n", "            if False:\n"),
    Mutant("a renewed bundle lacks the list", RUN_KEYS, "            if known.content:\n", "            if False:\n"),
    Mutant("the list goes to the authority only", RUN_KEYS, "            for place in (self._authority, *others):", "            for place in (self._authority,):"),
    Mutant("two commands write at once", RUN_KEYS, "        return locked(self._authority / _LOCK, busy)\n", "        return nullcontext()\n",
           also=(RUN_KEYS, "import AbstractContextManager, contextmanager", "import AbstractContextManager, contextmanager, nullcontext")),
    Mutant("half of the keys stay after a failure", RUN_KEYS, "                shutil.rmtree(part, ignore_errors=True)\n", "                pass\n"),
    Mutant("new keys replace those that are there", RUN_KEYS, "        if os.path.lexists(place):\n            raise _exists(place, folder)\n", "        shutil.rmtree(place, ignore_errors=True)\n"),
    Mutant("a launch leaves its keys behind", RUN_KEYS, '    with tempfile.TemporaryDirectory(prefix="atoll-keys-") as folder:', '    if folder := tempfile.mkdtemp(prefix="atoll-keys-"):'),
    Mutant("workers are shown by the letters of their names", RUN_KEYS, "int(seat) if seat.isdecimal() else 0", "0"),
    Mutant("a bundle that cannot be used is shown as valid", RUN_KEYS, "                Identity.load(bundle, now)\n", "                pass\n"),
    Mutant("a revoked bundle is shown as valid", RUN_KEYS, "            if revoked.has(known.bearer):\n", "            if False:\n"),
    Mutant("a path with a space is copied in two", "cli/keys.py", "    place = quote(str(folder))\n", "    place = str(folder)\n"),
    Mutant("nobody is renewed without a word", "cli/keys.py", "    if not bearers:\n", "    if False:\n"),
]  # fmt: skip


def _found_by(mutants: list[Mutant], *tests: str) -> list[Mutant]:
    return [replace(mutant, tests=tests) for mutant in mutants]


MUTANTS = [
    *_found_by(STRANGERS, CONNECTIONS, LISTS),
    *_found_by(CERTIFICATES, FILES, CONNECTIONS),
    *_found_by(BUNDLES, FILES),
    *_found_by(REVOKED, LISTS),
    *_found_by(KEYS, FILES, COMMANDS),
]
