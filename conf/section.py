"""What options are made of: types of values, paths, the base of every section, and how a wrong one is refused.

Does not know which options there are.
"""

import difflib
import os
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo

from paceline.conf.elsewhere import GIVEN, here
from paceline.models.errors import Refusal

Dtype = Literal["bfloat16", "float16", "float32"]
Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy and torch can both be seeded with
TopP = Annotated[float, Field(gt=0, le=1)]


def nearest(wrong: Any, valid: Iterable[str]) -> str:
    """The valid name that looks most like `wrong`; the last part of a dotted name counts as much as the whole."""

    def likeness(name: str) -> float:
        last, part = name.rsplit(".", 1)[-1], str(wrong).rsplit(".", 1)[-1]
        whole = difflib.SequenceMatcher(None, str(wrong).lower(), name.lower()).ratio()
        return whole + difflib.SequenceMatcher(None, part.lower(), last.lower()).ratio()

    return max(sorted(valid), key=likeness, default="none")


def no_such_option(wrong: str, valid: Collection[str]) -> str:
    """One line that names the option which is called so elsewhere, or else the nearest."""
    option = here(wrong, valid)
    if option is None:
        return f"{wrong}: no such option; nearest: {nearest(wrong, valid)}"
    given = f" ({GIVEN[option]})" if option in GIVEN else ""
    return f"{wrong}: no such option; here it is {option}{given}"


def absolute(path: str, info: ValidationInfo) -> str:
    """`path` as seen from the folder the command was given in (`context["cwd"]`), whatever Hydra changes to later."""
    start = (info.context or {}).get("cwd") or os.getcwd()
    return os.path.normpath(os.path.join(start, os.path.expanduser(path)))


def existing(option: str, path: str, words: Iterable[str] = ()) -> str:
    """The absolute `path`, or a Refusal that names it and what is there instead: a file, or one of the `words`."""
    if not os.path.exists(path):
        parent = next(p for p in Path(path).parents if p.is_dir())
        names = {p.name: str(p) for p in parent.iterdir()} | {word: word for word in words}
        alike = difflib.get_close_matches(Path(path).relative_to(parent).parts[0], names, n=1)
        raise Refusal(f"{option}: no such file or folder: {path}; nearest: {names[alike[0]] if alike else parent}")
    return path


def writable(option: str, folder: str) -> None:
    """Raises Refusal where a folder is not there and cannot be made, or cannot be written into."""
    there = next(place for place in (folder, *map(str, Path(folder).parents)) if os.path.exists(place))
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        fault = "cannot be written into" if os.path.isdir(there) else "is no folder"
        raise Refusal(f"{option}: {folder} cannot be written, {there} {fault}; give another {option}")


def word_or_file(option: str, value: str, words: Iterable[str], info: ValidationInfo) -> str:
    """One of the `words` as it is, else the absolute path of a file there is."""
    return value if value in words else existing(option, absolute(value, info), words)


Place = Annotated[str, AfterValidator(absolute)]


class Section(BaseModel):
    """A group of options: unknown names are refused, values are taken as they are, nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    def plain(self) -> dict[str, Any]:
        """Dicts, lists, strings and numbers."""
        return self.model_dump(mode="json")

    def yaml(self) -> str:
        return yaml.safe_dump(self.plain(), sort_keys=False, allow_unicode=True)


def folder_or_hub_id(option: str, path: str, info: ValidationInfo) -> str:
    """The absolute path of a folder there is, or what may be a hub id as it is."""
    local = absolute(path, info)
    if os.path.exists(local) or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path):
        return existing(option, local)
    return path


def option_names(tree: dict[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of all options and sections of a config of plain types."""
    names = []
    for key, value in tree.items():
        names.append(prefix + key)
        if isinstance(value, dict):
            names += option_names(value, f"{prefix}{key}.")
    return names


def validated(schema: type[Section], tree: dict[str, Any], cwd: str) -> Section:
    """The config that `tree` (plain types) describes, relative paths taken from `cwd`. Raises Refusal: one line."""
    names = option_names(tree)
    for name in names:
        value: Any = tree
        for key in name.split("."):
            value = value[key]
        if value == "???":
            raise Refusal(f"{name}: must be given, as {name}=VALUE")
    try:
        return schema.model_validate(tree, context={"cwd": cwd})
    except ValidationError as error:
        raise Refusal(one_line(error, names)) from None


def one_line(error: ValidationError, names: list[str]) -> str:
    """The first thing pydantic has to say, in the words of a command line."""
    first = error.errors(include_url=False)[0]
    name, kind, value = ".".join(map(str, first["loc"])), first["type"], first["input"]
    reason = first.get("ctx", {}).get("error")
    if isinstance(reason, Refusal):
        return str(reason)
    if kind == "extra_forbidden":
        return no_such_option(name, set(names) - {name})
    if kind == "missing":
        return f"{name}: must be given"
    wanted = first["msg"].replace("Input should be", "must be")
    if kind == "literal_error":
        wanted += "; nearest: " + nearest(value, re.findall("'([^']*)'", first["ctx"]["expected"]))
    section, _, last = name.rpartition(".")
    beside = [n.rpartition(".")[2] for n in names if n.rpartition(".")[0] == section and n != name]
    for other in difflib.get_close_matches(last, beside, n=1, cutoff=0.85):  # method.head=3
        wanted += f"; or is {section}.{other} meant?"
    return f"{name}: {value!r} is refused, {wanted}"
