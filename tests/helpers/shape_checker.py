"""Checks of annotations at run time: `pytest --jaxtyping-packages=async_grpo.algorithm,shape_checker.check`."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as for mypy
