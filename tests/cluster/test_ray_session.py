"""Joining a Ray cluster: what a user who is not let in is told."""

import pytest
import ray
from ray.exceptions import AuthenticationError, UnserializableException

from async_grpo.cluster import ray_session
from async_grpo.cluster.ray_session import RAY_IS_UP, cause_of, connect
from async_grpo.errors import ConfigurationError


@pytest.mark.parametrize(
    "refusal",
    [
        AuthenticationError("Token authentication is enabled but no authentication token was found."),
        RuntimeError("Authentication token is missing or incorrect"),
        ConnectionError("Failed to connect to Ray cluster"),
    ],
)
def test_who_is_not_let_in_learns_where_the_token_comes_from(monkeypatch, refusal):
    def refuse(**_):
        raise refusal

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(ConfigurationError, match="`ray get-auth-token --generate` makes the token") as error:
        connect("run")
    assert "RAY_AUTH_MODE=token" in str(error.value) and "~/.ray/auth_token" in str(error.value)


def test_a_program_that_was_started_beside_ray_knocks_once_ray_is_up(monkeypatch, tmp_path):
    joined, ray_is_up = [], tmp_path / "ray-is-up"
    monkeypatch.setenv(RAY_IS_UP, str(ray_is_up))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(ray, "init", lambda **_: joined.append(ray_is_up.exists()))
    monkeypatch.setattr(ray_session.time, "sleep", lambda _: ray_is_up.touch())
    connect("run")
    assert joined == [True]


def test_an_error_of_a_class_that_only_the_actor_knows_is_told_without_it():
    """As with --engine-python, where this process has no vLLM."""
    trace = "Traceback (most recent call last):\n  File ...\nvllm.exceptions.Refused: no such option\n"
    assert cause_of(UnserializableException(trace)) == "vllm.exceptions.Refused: no such option"
    assert cause_of(ValueError("two\nlines")) == "ValueError: two lines"
