"""The name and the version that Holdfast is installed by, and the commands that install it, for remedies of errors.

They install from a checkout, or from a wheel built of one: the package index has another project named holdfast, whose
wheel installs a package of the same name.
"""

import re
from importlib.util import find_spec
from pathlib import Path

DISTRIBUTION = "holdfast-outbox"


def package_version() -> str:
    """Return the version of Holdfast that is installed."""
    from importlib.metadata import version  # few ask, and it is slow to import

    return version(DISTRIBUTION)


def other_owners() -> dict[str, str]:
    """Return the other distributions that were installed into the folder of this package: version by name."""
    from importlib.metadata import distributions

    here = Path(__file__).resolve().parent
    return {
        each.name: each.version
        for each in distributions()
        if re.search("^holdfast/", each.read_text("RECORD") or "", re.MULTILINE)
        and Path(str(each.locate_file("holdfast"))).resolve() == here
        and each.name != DISTRIBUTION
    }


def missing_files() -> list[str]:
    """Return the files of this package that are gone, as when another project was removed from its folder."""
    from importlib.metadata import files

    ours = [file for file in files(DISTRIBUTION) or () if file.parts[0] == "holdfast" and file.suffix != ".pyc"]
    return [str(file) for file in ours if not Path(str(file.locate())).exists()]


def extra_remedy(extra: str) -> str:
    """Return the command that installs an extra.

    >>> extra_remedy("cli")
    "pip install '.[cli]' in a checkout of Holdfast, or 'PATH/TO/HOLDFAST.whl[cli]'"
    """
    return f"pip install '.[{extra}]' in a checkout of Holdfast, or 'PATH/TO/HOLDFAST.whl[{extra}]'"


class MissingExtra(ModuleNotFoundError):
    """The packages of an extra are not installed."""

    def __init__(self, package: str, extra: str) -> None:
        self.problem = f"{package} is not installed"
        self.remedy = extra_remedy(extra)
        super().__init__(f"{self.problem}; {self.remedy}", name=package)

    def __reduce__(self) -> tuple[type[ModuleNotFoundError], tuple[str]]:
        return ModuleNotFoundError, (str(self),)


def require_extra(extra: str, *packages: str) -> None:
    """Raise an ImportError with the command that installs an extra, if its packages are missing."""
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtra(package, extra)


def release_remedy(release: str) -> str:
    """Return the command that installs a release or a later one."""
    return f"install {DISTRIBUTION} {release} or later, from a checkout or a wheel of it"


REINSTALLING = "pip install --force-reinstall --no-deps PATH/TO/HOLDFAST.whl"


def mending_remedy(other: str) -> str:
    """Return the commands that remove another distribution from the package, and restore the files they shared."""
    return f"pip uninstall --yes {other}\n{REINSTALLING}"
