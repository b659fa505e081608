"""How Holdfast is installed, for the remedies of errors: from a checkout, or from a wheel that was built of one.

The package index has another project under this name, so no remedy may lead there.
"""


def extra_remedy(extra: str) -> str:
    """Return what installs an extra.

    >>> extra_remedy("cli")
    "pip install '.[cli]' in a checkout of Holdfast, or 'PATH/TO/HOLDFAST.whl[cli]'"
    """
    return f"pip install '.[{extra}]' in a checkout of Holdfast, or 'PATH/TO/HOLDFAST.whl[{extra}]'"


def missing_extra(extra: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error of a module that needs an extra, for the one that Python raised."""
    return ModuleNotFoundError(f"{error.name} is not installed: {extra_remedy(extra)}", name=error.name)


def release_remedy(release: str) -> str:
    """Return what installs a release, or a later one."""
    return f"install holdfast {release} or later, from a checkout or a wheel of it"
