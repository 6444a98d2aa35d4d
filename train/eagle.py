"""Train an EAGLE drafter on a frozen target's hidden states: accelerate launch train/eagle.py [option=value ...]"""

from paceline.conf.entry import entry
from paceline.conf.schema import TrainConfig


def run(cfg: TrainConfig) -> None:
    from paceline.train.loop import fit  # torch and friends load only after the options were checked

    fit(cfg)


main = entry("eagle", run)

if __name__ == "__main__":
    main()
