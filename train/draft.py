"""Train a draft model for a frozen target: accelerate launch train/draft.py [option=value ...]"""

from paceline.conf.entry import entry
from paceline.conf.schema import TrainConfig


def run(cfg: TrainConfig) -> None:
    from paceline.train.loop import fit  # torch and friends load only after the options were checked

    fit(cfg)


main = entry("draft", run)

if __name__ == "__main__":
    main()
