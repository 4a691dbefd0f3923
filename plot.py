"""`python plot.py plot training_metrics.jsonl -o plots.svg`: the same as `async-grpo plot ...`."""

from async_grpo.observe.plot import main

if __name__ == "__main__":
    main()
