"""How Holdfast is installed, for the remedies of errors: from a checkout, or from a wheel that was built of one.

The package index has another project under this name, so no remedy may lead there.
"""

from importlib.util import find_spec


def extra_remedy(extra: str) -> str:
    """Return what installs an extra.

    >>> extra_remedy("cli")
    "pip install '.[cli]' in a checkout of Holdfast, or 'PATH/TO/HOLDFAST.whl[cli]'"
    """
    return f"pip install '.[{extra}]' in a checkout of Holdfast, or 'PATH/TO/HOLDFAST.whl[{extra}]'"


def require_extra(extra: str, *packages: str) -> None:
    """Refuse to import what needs the packages of an extra, with the command that installs it."""
    for package in packages:
        if find_spec(package) is None:
            raise ModuleNotFoundError(f"{package} is not installed; {extra_remedy(extra)}", name=package)


def release_remedy(release: str) -> str:
    """Return what installs a release, or a later one."""
    return f"install holdfast {release} or later, from a checkout or a wheel of it"
