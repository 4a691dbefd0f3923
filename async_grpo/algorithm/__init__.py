"""The arithmetic of policy-gradient training: pure functions on (batch, tokens) tensors.

Annotations give the shape of a tensor (jaxtyping): `Float[Tensor, "batch tokens"]` has two axes, `Float[Tensor, ""]` is a
scalar. These names of axes mean the same in `algorithm`, `modeling` and `training`:

- `batch`: rows. A row is one sample, or several sequences packed end to end.
- `tokens`: the tokens of each row, padded to the longest row. Without the axis `batch`, any list of tokens.
- `columns`: tokens, or a single column that stands for whole rows.
- `packed`: the tokens of one packed row. With an axis of length 1 before it, the packed row is a batch of one row.
- `sequences`: the sequences of a packed row.
- `boundaries`: the index at which each sequence of a packed row begins, followed by the length of the row.
- `inputs`: the tokens of a packed row that the model reads.
- `rows`: the distinct hidden states of these inputs, not the rows of `batch`. Two inputs share a hidden state if their
  tokens, and all tokens before them in their sequences, are equal (see `modeling.packed.Packing`).
- `vocab`, `hidden`, `heads`, `head_dim`: sizes of the model.
- `bins`: bins of `off_policy.ratio_histogram`.
- `ranks`: processes of the training.
- `trajectories`: trajectories with several sequences.
- `pools`: parts of a set of values, whose means and variances are merged into those of the whole set.

`Float` is any float, `Int` any signed integer, and `Shaped` any dtype. A mask annotated with `Shaped` is True where it
is not zero. An axis `#columns` may also have length 1 and is then broadcast. `*shape` is any number of axes. An axis
whose name begins with an underscore (`_tokens`) may have another length in each tensor. A leading blank (`" tokens"`)
keeps linters from reading the name as a variable. A plain `Tensor` has any shape, for example that of a weight.
"""
