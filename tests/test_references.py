"""Files, modules and names that docstrings, comments and pages point at: they are there."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from language import pages
from test_import_order import PACKAGE, name_of, sources

from cpdhpc.config import keys_inside
from cpdhpc.lab.autoencoder.job import Autoencoder
from cpdhpc.lab.study.spec import Study
from cpdhpc.lab.train.job import Job

ROOT = PACKAGE.parent
PAGES = [*pages(), ROOT / "CHANGELOG.md"]
CODE = re.compile(r"`([^`\n]+)`")
FENCED = re.compile(r"^ *```.*?^ *```|^(?: {4}[^\n]*\n)+", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?<![\w./<-])([\w/]+\.(?:py|cu|cpp|h))\b")
CONSTANT_OF = re.compile(r"\b([A-Z][A-Z_]{2,}) (?:of|in) `?([\w/]+\.py)\b")
DOTTED = re.compile(r"(?<![\w.@/<-])([a-z_]\w*(?:\.[A-Za-z_]\w*)+)(?![\w/-])")
ENDINGS = {
    "cfg", "cpp", "cu", "h", "h5", "html", "j2", "lsf", "md", "pbs", "png", "py", "sh", "so",
    "toml", "txt",
}  # fmt: skip
OTHERS = {  # what is not ours, or an example of a user's
    "cpdhpc/FILE.py", "mine.py", "cpdhpc/compress/mine.py", "plan.interior.parts", "nets.py",
    "ddp.register_comm_hook", "data.of",
    "quantization_ref_nvfp4.py",  # of Transformer Engine
    "data.KEY", "metrics.NAME", "ring.py", "layers.coded.size", "formats.NAME", "malloc.h",
    "YOUR_PROGRAM.py", "first.py",
    "cpdhpc.train.Lars",  # a former name, which lazy.formerly finds
}  # fmt: skip


def texts() -> Iterator[tuple[Path, str]]:
    """What people read: docstrings and comments of the package, code in the text of pages."""
    for path in PACKAGE.rglob("*.py"):
        with io.StringIO(path.read_text()) as lines:
            found = [
                token.string
                for token in tokenize.generate_tokens(lines.readline)
                if token.type == tokenize.COMMENT or token.string.lstrip("rf").startswith('"""')
            ]
        yield path, "\n".join(found)
    for path in PAGES:
        if path.name != "CHANGELOG.md":  # which tells what was there
            yield path, "\n".join(CODE.findall(FENCED.sub("", path.read_text())))


@cache
def files() -> frozenset[str]:
    """The files of the repository, as paths in it."""
    found = (
        path
        for part in ("cpdhpc", "docs", "kernels", "tests", "inputs")
        for path in (ROOT / part).rglob("*")
    )
    return frozenset(path.relative_to(ROOT).as_posix() for path in [*found, *ROOT.glob("*")])


def lost_files(text: str) -> list[str]:
    """Files that a text names, whole or by their last parts, and that are not there."""
    return [
        name
        for name in FILE.findall(text)
        if name not in OTHERS and not any(f"/{path}".endswith(f"/{name}") for path in files())
    ] + [
        f"{constant} of {name}"
        for constant, name in CONSTANT_OF.findall(text)
        if not any(
            re.search(rf"^{constant}\b.*=", text_of(ROOT / path), re.MULTILINE)
            for path in files()
            if f"/{path}".endswith(f"/{name}")
        )
    ]


@cache
def modules() -> dict[str, ast.Module]:
    """Module, such as "cpdhpc.ops" -> its syntax tree."""
    dotted = {f"cpdhpc.{name_of(p)}".replace("/", "."): tree for p, tree in sources().items()}
    return dotted | {"cpdhpc": dotted["cpdhpc.__init__"]}


@cache
def called(last: str) -> list[str]:
    """The modules whose names end with a word."""
    return [name for name in modules() if name.rpartition(".")[2] == last]


@cache
def members(start: str) -> set[str]:
    """What may follow the name of an object that is called as its module: reducer.epoch."""
    package = start if (ROOT / start.replace(".", "/")).is_dir() else start.rpartition(".")[0]
    found = set[str]()
    for name, tree in modules().items() if package != "cpdhpc" else ():
        if name == package or name.startswith(f"{package}."):
            found |= names_of(name)
            found |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    return found


@cache
def job_keys() -> set[str]:
    """The keys of jobs and studies, as table.key."""
    models = (Job, Study, Autoencoder)
    return {f"{t}.{k}" for m in models for t in m.model_fields for k in keys_inside(m, t)}


def is_there(name: str) -> bool:
    """Whether a dotted name that begins with a module of ours leads to something."""
    first, second, *more = name.removeprefix("cpdhpc.").split(".")
    if f"{first}.{second}" in job_keys() | OTHERS:
        return True
    for here in called(first):
        left, whole = [second, *more], here
        while left and f"{here}.{left[0]}" in modules():
            here = f"{here}.{left.pop(0)}"
        if not left or left[0] in names_of(here) or (not more and second in members(whole)):
            return True
    return False


def lost_names(text: str) -> list[str]:
    """Dotted names that a text begins with a module of ours, and that lead nowhere."""
    names = (n for n in DOTTED.findall(text) if n.rpartition(".")[2] not in ENDINGS)
    ours = (n for n in names if "." in n.removeprefix("cpdhpc."))
    return [
        name
        for name in ours
        if called(name.removeprefix("cpdhpc.").partition(".")[0])
        and not name.startswith("torch.")  # of torch itself
        and name not in OTHERS
        and not is_there(name)
    ]


def test_files_that_texts_name_are_there() -> None:
    wrong = {
        str(path.relative_to(ROOT)): found for path, text in texts() if (found := lost_files(text))
    }
    assert wrong == {}
    assert lost_files("see nothing.py, torch/reducer.py, DEFAULT of lab/bench/machine.py") == [
        "nothing.py",
        "DEFAULT of lab/bench/machine.py",
    ]


def test_names_that_texts_point_at_are_there() -> None:
    wrong = {
        str(path.relative_to(ROOT)): found for path, text in texts() if (found := lost_names(text))
    }
    assert wrong == {}
    said = "ops.reference_integers, study.case_file.OUTCOMES, train.epochs, reducer.epoch, np.sum"
    assert lost_names(said) == ["ops.reference_integers", "study.case_file.OUTCOMES"]


def test_identifiers_in_pages_are_in_the_code() -> None:
    """Of backquoted words those that look like names: with an underscore, or all capitals."""
    known = {"ompi_info", "gradient_as_bucket_view", "static_graph", "CUDA_VISIBLE_DEVICES"}
    known |= {"MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE", "adversarial_running_mean"}
    known |= {"MASTER_ADDR", "MASTER_PORT"}
    known |= {"accumulate_grad_batches", "gradient_clip_val", "skip_synchronize"}  # of others
    known |= {"split_group", "register_pre_hook", "TORCH_DIST_NAN_CHECK"}
    for path in files():
        if (ROOT / path).suffix in (".py", ".pyi", ".h", ".cu", ".cpp", ".toml", ".j2", ""):
            known |= set(re.findall(r"\w+", text_of(ROOT / path)))
    wrong = {
        path.name: lost
        for path in PAGES
        if path.name not in ("CHANGELOG.md", "coming_from.md")  # which names those of others
        and (lost := identifiers(FENCED.sub("", path.read_text())) - known)
    }
    assert wrong == {}
    assert identifiers("`no_such` or `NONE`, `all` and `x.y_z`") == {"no_such", "NONE"}


def text_of(path: Path) -> str:
    return path.read_text(errors="ignore") if path.is_file() else ""


def identifiers(text: str) -> set[str]:
    found = re.findall(r"`(\w+)(?:\(\))?`", text)
    return {n for n in found if n[:1].isalpha() and ("_" in n or (n.isupper() and len(n) > 3))}


@cache
def names_of(module: str) -> set[str]:
    """What a module of the package defines or imports, and the modules in it."""
    path, tree = ROOT / module.replace(".", "/"), modules().get(module)
    names = {part.stem for part in path.glob("*")} if path.is_dir() else set()
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names | {"__version__"}


# With what follows in brackets; also in programs that tests start, which are strings there.
IMPORTED = re.compile(r"^ *(from cpdhpc[\w.]* import (?:\([^)]*\)|[^(\n;\\]*))", re.MULTILINE)


def missing(text: str) -> list[str]:
    """Names that a text imports from the package and that are not there."""
    found = (ast.parse(statement).body[0] for statement in IMPORTED.findall(text))
    return [
        f"{node.module}.{alias.name}"
        for node in found
        if isinstance(node, ast.ImportFrom) and node.module and node.module != "cpdhpc._cpu"
        for alias in node.names
        if alias.name not in names_of(node.module)
    ]


def test_what_tests_import_exists() -> None:
    """The MPI tests are not collected in the serial run: a name lost there shows here."""
    wrong = {
        path.name: names
        for path in Path(__file__).parent.rglob("*.py")
        if (names := missing(path.read_text()))
    }
    assert not wrong
    text = "    from cpdhpc.store import (\n        read as here,  # of it\n        gone,\n    )\n"
    assert missing(text + "from cpdhpc import lost") == ["cpdhpc.store.gone", "cpdhpc.lost"]


ROW = re.compile(r"^\| (?:an?|another) .*\|$", re.MULTILINE)  # of the table of changes
TABLE = re.compile(r"`([A-Z][A-Z_]+)`")


def lost(row: str) -> list[str]:
    """Paths that a row of the page names and that are not there, and tables in none of them."""
    files, wrong, place = list[Path](), list[str](), PACKAGE
    for name in re.findall(r"`([\w/]+(?:\.py)?)`", row):
        if "/" not in name and not name.endswith(".py"):
            continue
        root = PACKAGE.parent if name.startswith(("kernels/", "tests/", "docs/")) else PACKAGE
        path = next((each for each in (place / name, root / name) if each.exists()), root / name)
        place = path if path.is_dir() else path.parent
        files += path.rglob("*.py") if path.is_dir() else [path] * path.exists()
        wrong += [] if path.exists() else [name]
    texts = [path.read_text() for path in files]
    tables = TABLE.findall(row)
    there = [any(re.search(rf"^{n}\b.* = ", text, re.MULTILINE) for text in texts) for n in tables]
    return wrong + [name for name, is_there in zip(tables, there, strict=True) if not is_there]


def test_the_page_of_changes_names_what_is_there() -> None:
    page = (PACKAGE.parent / "docs/design.md").read_text()
    rows = ROW.findall(page.partition("## Where a change goes")[2])
    assert len(rows) > 10
    assert {row: names for row in rows if (names := lost(row))} == {}
    row = "| a thing | a row of `ROWS` in `methods.py` or `gone.py` |"
    assert lost(row) == ["gone.py", "ROWS"]
