"""Training a policy that draws: what differs from a language model in loading, sharding, loss and export."""
