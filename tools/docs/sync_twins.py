"""An extension of griffe, which reads the SDK for the site: a sync method that is made of an async one is shown as it.

`versions = blocking(AsyncHub.versions)` is an assignment to who reads the source without running it. The site shows
the signature and the docstring of the async method.
"""

from typing import Any, Final

from griffe import Attribute, Class, Extension, Function, Module

MODULES: Final = ("sync.hub", "sync.rollouts")
MADE_BY: Final = "blocking("


class SyncTwins(Extension):
    """Replaces the assignments by functions."""

    def on_package(self, *, pkg: Module, **_kwargs: Any) -> None:  # noqa: ANN401 (griffe calls it so)
        """Look through the classes of the sync SDK."""
        if pkg.name == "tensorhub":
            for made in (each for module in MODULES for each in pkg[module].members.values()):
                if isinstance(made, Class):
                    for member in list(made.members.values()):
                        if isinstance(member, Attribute) and str(member.value).startswith(MADE_BY):
                            made.set_member(member.name, _function(made, member))


def _function(owner: Class, member: Attribute) -> Function:
    name, _, method = str(member.value).removeprefix(MADE_BY).rstrip(")").partition(".")
    twin = owner.module[name].final_target[method]
    return Function(
        member.name,
        lineno=member.lineno,
        endlineno=member.endlineno,
        parameters=twin.parameters,
        returns=twin.returns,
        docstring=twin.docstring,
        parent=owner,
    )
