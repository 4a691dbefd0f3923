"""Grammars of typed answers that are made in this process, and whether a text keeps to one."""

import xgrammar
from host_here import HostHere

from async_grpo.inference.output_grammars import GrammarHost


class GrammarsHere(HostHere):
    """A `GrammarProcess` without a process."""

    host_class = GrammarHost


def accepts(tokenizer, grammar: str, text: str) -> bool:
    """Return whether a text, which ends there, keeps to a grammar."""
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer)
    compiled = xgrammar.GrammarCompiler(info).compile_structural_tag(grammar)
    matcher = xgrammar.GrammarMatcher(compiled)
    token_ids = [*tokenizer.encode(text, add_special_tokens=False), info.stop_token_ids[0]]
    return all(matcher.accept_token(token_id) for token_id in token_ids)
