"""`python worker_dispatcher.py --mode generation ...`: the same as `async-grpo worker --mode generation ...`."""

from async_grpo.launch.worker import main

if __name__ == "__main__":
    main()
