"""The arithmetic of policy-gradient training: pure functions on (batch, tokens) tensors, torch alone.

Annotations give the shape of a tensor (jaxtyping): `Float[Tensor, "batch tokens"]` has two axes, `Float[Tensor, ""]` is a
scalar. These names of axes mean the same in `algorithm`, `modeling` and `training`:

- `batch`: rows. A row is one sample, or several sequences packed end to end.
- `tokens`: the tokens of each row, padded to the longest row; of a tensor without rows, a number of tokens.
- `columns`: tokens, or a single column that stands for whole rows.
- `packed`: the tokens of one packed row; with an axis of length 1 before it, that row is a batch.
- `sequences`, and `boundaries`: the sequences of a packed row; where each begins, followed by the end of the row.
- `inputs`, `rows`: tokens of a packed row with a state, and rows of states that they share (`modeling.packed.Packing`).
- `vocab`, `hidden`, `heads`, `head_dim`: sizes of the model.
- `bins`: bins of `off_policy.ratio_histogram`.
- `ranks`, `trajectories`, `pools`: ranks of the training, trajectories of several sequences, pools of values.

`Float` is any float, `Int` any signed integer, and `Shaped` any dtype: a mask of that kind is True where it is not zero.
An axis `#columns` may also have length 1, which is broadcast; `*shape` is any number of axes, and `_tokens` need not have
one length in all tensors. A leading blank (`" tokens"`) keeps linters from reading the name as a variable. A plain `Tensor`
has any shape, for example that of a weight.
"""
