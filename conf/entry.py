"""The way in: composes the yaml files and the command line, checks all of it, and only then lets `run` begin.

Owns Hydra, and that whatever is refused is one line on stderr and exit code 2. Does not know what `run` does.
"""

import contextlib
import functools
import json
import logging
import os
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from paceline.conf import schema_scripts as scripts
from paceline.conf.elsewhere import here
from paceline.conf.schema import TrainConfig
from paceline.conf.section import Section, nearest, no_such_option, option_names, validated, writable
from paceline.models.errors import Refusal

CONF = Path(__file__).parent

_SCHEMAS: dict[str, type[Section]] = {
    "benchmark": scripts.BenchmarkConfig,
    "cache_features": scripts.CacheConfig,
    "compare": scripts.CompareConfig,
    "conformance": scripts.ConformanceConfig,
    "convert": scripts.ConvertConfig,
    "evaluate": scripts.EvaluateConfig,
    "generate": scripts.GenerateConfig,
    "inspect_data": scripts.InspectConfig,
    "joint": scripts.JointConfig,
    "side_by_side": scripts.SideBySideConfig,
    "synthesize": scripts.SynthesizeConfig,
    "tune": scripts.TuneConfig,
    "watch": scripts.WatchConfig,
}

_READS_PATH = {"target": "hf", "data": "jsonl"}  # group -> the choice that a folder, a file or a hub id is given with


def entry(name: str, run: Callable[[Any], None], text: tuple[str, ...] = ()) -> Callable[[], None]:
    """The `main()` of a program that runs `run(cfg)` with `conf/NAME.yaml` and the options of its command line.

    Args:
        run: gets the validated config; a Refusal it raises becomes one line and exit code 2 as well.
        text: options that hold free text, taken as typed: no quotes are needed around commas or braces.
    """

    def main() -> None:
        cwd = os.getcwd()  # before Hydra may change it: what the user's relative paths start from

        @functools.wraps(run)
        def job(cfg: DictConfig) -> None:
            with _one_line(common=True):
                checked = _checked(name, cfg, cwd)
            with _one_line():
                run(checked)

        with _one_line(common=True):
            sys.argv[1:] = [_quoted(word, text) for word in sys.argv[1:]]
            _check(name, _arguments(name), cwd)
        hydra.main(version_base="1.3", config_path=str(CONF), config_name=name)(job)()

    return main


def load(name: str, *overrides: str) -> Any:
    """The validated config of `conf/NAME.yaml`, as `load("medusa", "target=tiny")`. Raises Refusal."""
    with _composer(CONF) as loader:
        return _checked(name, _composed(loader, name, list(overrides)), os.getcwd())


@contextlib.contextmanager
def _one_line(common: bool = False) -> Iterator[None]:
    """Turn a refusal into one line and exit code 2; Ctrl-C likewise, code 130.

    Of several processes each says what it met, which the others may not have, unless it is common to all.
    """
    rank = os.environ.get("RANK", "0")
    first = rank == "0"
    try:
        yield
    except _refusals() as refusal:
        if first or not (common or getattr(refusal, "common", False)):
            said = "" if first else f"rank {rank}: "
            print(f"paceline: {said}{' '.join(str(refusal).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if first:
            print("\npaceline: stopped", file=sys.stderr)
        raise SystemExit(130) from None


def _refusals() -> tuple[type[Exception], ...]:
    """What is refused by models, decode and conf, and by data, which knows none of them. Asked only after a failure."""
    data = sys.modules.get("paceline.data.records")
    return (Refusal, data.BadData) if data else (Refusal,)


def _arguments(name: str) -> Namespace:
    parser = get_args_parser()
    flags = [flag for action in parser._actions for flag in action.option_strings]

    def error(message: str) -> Any:
        dashed = (word.partition("=")[0] for word in sys.argv[1:] if word.startswith("-"))
        wrong = next((word for word in dashed if word not in flags), None)
        option = wrong and _as_flag(name, wrong)
        if option:
            raise Refusal(f"{wrong}: options are given as NAME=VALUE, this one as {option}=VALUE")
        hint = f"{wrong}: no such flag; nearest: {nearest(wrong, flags)}" if wrong else message
        raise Refusal(f"{hint} (options are given as NAME=VALUE)")

    parser.error = error
    return parser.parse_args()


def _as_flag(name: str, flag: str) -> str | None:
    """The option of the program NAME that is meant by --learning-rate, or by --lr."""
    option = flag.lstrip("-").replace("-", "_")
    with _composer(CONF):
        valid = option_names(_plain(hydra.compose(name)))
    named = [one for one in valid if f".{one}".endswith(f".{option}")]
    return min(named, key=len, default=None) or here(option, valid)


def _quoted(word: str, text: tuple[str, ...]) -> str:
    """`prompt=Yes, really?` in the quotes that Hydra's grammar wants, so that the text arrives as typed."""
    key, given, value = word.partition("=")
    if not given or key not in text or value == "null" or re.fullmatch(r"(['\"]).*\1", value, re.DOTALL):
        return word
    return f"{key}={quoted(value)}"


def quoted(value: Any) -> str:
    """A value as Hydra's command line takes it: what stands there is read back as this value."""
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{quoted(part)}' for name, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{','.join(map(quoted, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    value = re.sub(r"(\\*)(\$\{)", r"\1\1\\\2", value)  # no interpolation
    value = re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return f"'{value}'"


def _check(name: str, args: Namespace, cwd: str) -> None:
    """Compose and validate every job that Hydra is about to run. Raises Refusal."""
    if args.help or args.hydra_help or args.shell_completion or args.experimental_rerun:
        return
    name = args.config_name or name
    folder = Path(args.config_path or CONF).resolve()
    words = list(args.overrides)
    if args.config_dir:
        words.append(f"hydra.searchpath=['file://{Path(args.config_dir).resolve()}']")
    with _composer(folder) as loader:
        overrides = [_parsed(word, loader) for word in words]
        if not args.multirun:
            cfg = _composed(loader, name, words)
            if not args.cfg and not args.info:
                _ready(name, cfg, cwd)
            return
        jobs = BasicSweeper.split_arguments(overrides, None)[0]
        outs = [getattr(_ready(name, _composed(loader, name, job), cwd), "out", None) for job in jobs]
    shared = next((out for i, out in enumerate(outs) if out and out in outs[:i]), None)
    if shared:
        hint = "name it after what differs: out='outputs/seed${seed}'"
        raise Refusal(f"out: several of the {len(jobs)} runs would write to {shared}; {hint}")


@contextlib.contextmanager
def _composer(folder: Path) -> Iterator[ConfigLoader]:
    """Hydra's loader over `folder`; its log stays quiet, since what it has to say is said in one line."""
    logging.getLogger("hydra").addHandler(logging.NullHandler())
    if not folder.is_dir():
        raise Refusal(f"--config-path: no such folder: {folder}")
    ours = GlobalHydra.instance()
    running, ours.hydra = ours.hydra, None  # that of a job which composes other configs, as scripts/compare.py does
    try:
        with hydra.initialize_config_dir(str(folder), version_base="1.3"):
            yield GlobalHydra.instance().config_loader()
    finally:
        GlobalHydra.instance().hydra = running


def _parsed(word: str, loader: ConfigLoader) -> Override:
    try:
        return OverridesParser.create(config_loader=loader).parse_override(word)
    except HydraException as error:
        key, given, value = word.partition("=")
        if not given:
            raise Refusal(f"{word}: options are given as NAME=VALUE") from None
        reason = str(error).splitlines()[0].removesuffix(".")
        raise Refusal(f"{key}: {value} cannot be read ({reason}); text goes into quotes: '{key}=\"TEXT\"'") from None


def _composed(loader: ConfigLoader, name: str, words: list[str]) -> DictConfig:
    """`conf/NAME.yaml` with the overrides `words`. What Hydra would refuse at length is a Refusal naming the option."""
    files = loader.get_group_options("")
    if name not in files:
        raise Refusal(f"--config-name: no such file {name}.yaml; nearest: {nearest(name, files)}")
    valid: list[str] = []
    try:
        chosen = set(hydra.compose(name, return_hydra_config=True).hydra.runtime.choices)
        groups, keys = [], []
        searched = [word for word in words if word.startswith("hydra.searchpath=")]  # --config-dir
        for word in words:
            override = _parsed(word, loader)
            if _is_choice(override, loader, chosen, searched):
                groups.append(word)
            else:
                keys.append(override.key_or_group)
        # The options there are, once the groups are chosen: Hydra's own message would name no neighbour.
        valid = [*chosen, *option_names(_plain(hydra.compose(name, [*searched, *groups], return_hydra_config=True)))]
        may_grow = getattr(_SCHEMAS.get(name), "open", None)
        for key in keys:
            if key not in valid and not key.startswith("hydra.job.env_set") and key.partition(".")[0] != may_grow:
                raise Refusal(_unknown(key, valid))
        return hydra.compose(name, words)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        message = str(error.__cause__ or error)
        named = re.search(r"full_key: (\S+)", message)
        if named and named[1] not in valid:
            raise Refusal(_unknown(named[1], valid)) from None
        raise Refusal(f"{named[1] if named else name}: {message.splitlines()[0]}") from None


def _unknown(key: str, valid: Iterable[str]) -> str:
    alike = [option for option in valid if option.startswith("hydra") == key.startswith("hydra")]
    return no_such_option(key, alike)


def _is_choice(override: Override, loader: ConfigLoader, chosen: set[str], searched: list[str]) -> bool:
    """Whether this chooses a file of a group (method=medusa), not a value. Raises Refusal where it chooses none."""
    group, choice = override.key_or_group, override.value()
    if override.is_sweep_override():
        raise Refusal(f"{group}: several values need --multirun, a text with commas needs quotes")
    choices = loader.get_group_options(group, config_name="base", overrides=searched) if "." not in group else []
    if not choices or isinstance(choice, dict):
        return False
    key = f"{group}@{override.package}" if override.package else group
    if key not in chosen:
        raise Refusal(_unknown(key, chosen))
    for one in choice if isinstance(choice, list) else [choice]:
        if one not in choices and not override.is_delete():
            place = group in _READS_PATH and re.search(r"[/.]", str(one))
            near = f"{group}={_READS_PATH[group]} {group}.path={one}" if place else nearest(one, choices)
            raise Refusal(f"{key}: no such choice {one!r}; nearest: {near} (of {', '.join(choices)})")
    return True


def _plain(cfg: DictConfig, resolve: bool = False) -> dict[str, Any]:
    tree = OmegaConf.to_container(cfg, resolve=resolve)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


def _ready(name: str, cfg: DictConfig, cwd: str) -> Section:
    """`_checked`, of a program that is about to run: what it finds can be written. Else hours may be lost."""
    checked = _checked(name, cfg, cwd)
    plain = getattr(checked, "plain_file", None)
    folders = {"out": getattr(checked, "out", None), "to": getattr(checked, "to", None)}
    for option, folder in (folders | {"plain": plain and os.path.dirname(plain)}).items():
        if folder is not None:
            writable(option, folder)
    return checked


def _checked(name: str, cfg: DictConfig, cwd: str) -> Section:
    for option in option_names(_plain(cfg)):
        try:
            OmegaConf.select(cfg, option)
        except OmegaConfBaseException as error:  # ${...} that leads nowhere
            raise Refusal(f"{option}: {str(error).splitlines()[0]}") from None
    return validated(_SCHEMAS.get(name, TrainConfig), _plain(cfg, resolve=True), cwd)
