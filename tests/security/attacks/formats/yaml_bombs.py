"""YAML that grows when it is read, in every kind of file that is written in YAML."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from attacks.hostile import Attacks

from neural_mp.config import load_settings
from neural_mp.core.plan import load_plan_file
from neural_mp.io.yaml_reader import load_yaml
from neural_mp.jobs.driver import compute_job_digest
from neural_mp.targets.profile import load_profile

YAML_BOMBS = Attacks("YAML bombs", seconds=20)


def _doubling(first: str, link: str, levels: int, separator: str = "\n") -> str:
    """Return mappings, each of which names the one before in the way that `link` says."""
    lines = [f"k0: &a0 {first}"]
    lines += [f"k{n}: &a{n} {link.replace('*', f'*a{n - 1}')}" for n in range(1, levels)]
    return separator.join(lines)


def _as_keys(text: str) -> str:
    return f"? {text}\n: 1\n"


#: Bomb → text of the file; `{canary}` is the file that only executed code makes.
_BOMBS: dict[str, str] = {
    "lists of lists": _doubling("[x, x]", "[*, *, *, *, *, *, *, *, *]", 12),
    "mappings of mappings": _doubling("{a: 1}", "{a: *, b: *, c: *, d: *}", 30),
    "merged mappings": _doubling("{a: 1, b: 2}", "{<<: [*, *, *], c: *}", 60),
    "merged lists of mappings": "k0: &a0 {a: 1}\nk1: {<<: ["
    + ", ".join(["*a0"] * 300_000)
    + "]}\n",
    "long texts": f"k0: &a0 {'x' * 100_000}\nk1: [" + ", ".join(["*a0"] * 900_000) + "]\n",
    "two aliases a level": _doubling("[x]", "[*, *]", 200),
    "an alias of itself": "k0: &a0 [*a0, *a0]\n",
    "a mapping merged into itself": "k0: &a0 {<<: *a0, a: *a0}\n",
    "an anchor given twice": "k0: &a [1]\nk1: &a [*a, *a]\nk2: &a [*a, *a]\n" * 30,
    "an alias as a key": "k0: &a [1]\n? *a\n: 1\n",
    "lists nested 200,000 deep": "k: " + "[" * 200_000,
    "lists nested by lines": "\n".join(" " * n + "-" for n in range(1500)),
    "mappings nested by lines": "\n".join(" " * n + "k:" for n in range(1500)),
    "keys in keys": "? " * 50_000 + "a",
    "closed lists 5,000 deep": "k: " + "[" * 5_000 + "]" * 5_000,
    "an integer of a million digits": "k: " + "9" * 1_000_000,
    "an integer of a million digits in base 16": "k: 0x" + "f" * 1_000_000,
    "an integer of a million bits": "k: 0b" + "1" * 1_000_000,
    "an integer in base 60": "k: 1" + ":59" * 100_000,
    "an integer of underscores": "k: 1" + "_" * 1_000_000,
    "a float of a million digits": "k: 0." + "1" * 1_000_000,
    "a float of a great exponent": "k: 1e999999999",
    "a number as a key": "9" * 100_000 + ": 1",
    "a tag that calls": "k: !!python/object/apply:os.system ['touch {canary}']",
    "a tag that calls with keywords": "k: !!python/object/apply:subprocess.run\n"
    "  kwds: {{args: [touch, '{canary}']}}",
    "a tag that makes an object": "k: !!python/object/new:pathlib.Path ['{canary}']",
    "a tag that changes a state": "k: !!python/object/new:type\n"
    "  args: [z, !!python/tuple [], {{extend: !!python/name:exec }}]\n"
    "  listitems: \"open('{canary}', 'w')\"",
    "a tag of a module": "k: !!python/module:this x",
    "a tag by its whole name": "k: !<tag:yaml.org,2002:python/object/apply:os.system>"
    " ['touch {canary}']",
    "a tag by a handle": "%TAG !e! tag:yaml.org,2002:python/object/apply:\n---\n"
    "k: !e!os.system ['touch {canary}']",
    "binary text of megabytes": "k: !!binary " + "QUFB" * 1_000_000,
    "a set": "k: !!set {{a, b}}",
    "a date": "k: !!timestamp 9999-99-99",
    "a key given 100,000 times": "k: 1\n" * 100_000,
    "a million keys": "\n".join(f"k{n}: 1" for n in range(1_000_001)),
    "a million empty lists": "k: [" + "[]," * 1_000_001 + "]",
    "a text without end": 'k: "' + "x" * 5_000_000,
    "a block without end": "k: |\n" + "  x\n" * 1_000_000 + "\t",
    "indents without end": "k:\n" + " " * 5_000_000,
    "comments of megabytes": "#" * 5_000_000 + "\nk: [",
    "a hundred thousand documents": "--- {{}}\n" * 100_000,
    "directives without end": "%YAML 1.1\n" * 10_000 + "--- {{}}",
    "NUL": "k: a\0b",
    "UTF-16": "k: [".encode("utf-16").decode("latin-1"),
    "escapes beyond Unicode": 'k: "\\UFFFFFFFF"',
    "surrogates": 'k: "\\uD800\\uDFFF"',
    "an anchor of a megabyte": f"k: &{'a' * 1_000_000} [1]\nl: *b",
    "an indicator that is reserved": "k: @a\nl: `b`",
}

#: Kind of file → its reader.
_READERS: dict[str, Callable[[Path], object]] = {
    "a tuning file": load_settings,
    "a plan": load_plan_file,
    "a profile of a target": lambda path: load_profile(str(path)),
}


def _writer(canary: Path, bomb: str) -> str:
    text = _BOMBS[bomb]
    return text.format(canary=canary) if "{{" in text or "{canary}" in text else text


def _plant(reader: Callable[[Path], object]) -> Callable[[Path, Path, str], None]:
    def read(folder: Path, canary: Path, bomb: str) -> None:
        path = folder / "file.yaml"
        path.write_bytes(_writer(canary, bomb).encode("utf-8", "surrogatepass"))
        reader(path)

    return read


for _kind, _reader in _READERS.items():
    YAML_BOMBS.here(f"{_kind} with", *_BOMBS)(_plant(_reader))


@YAML_BOMBS.here("the digest of a job with", *_BOMBS, refused=None)
def _is_a_job(folder: Path, canary: Path, bomb: str) -> None:
    path = folder / "file.yaml"
    path.write_bytes(_writer(canary, bomb).encode("utf-8", "surrogatepass"))
    compute_job_digest(path)


@YAML_BOMBS.here("an option of a command with", *_BOMBS, refused=None)
def _is_an_option(folder: Path, canary: Path, bomb: str) -> None:
    load_yaml(_writer(canary, bomb))


FAMILY = YAML_BOMBS.as_family()
