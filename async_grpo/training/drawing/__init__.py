"""Loading, sharding, loss and export of a policy that draws pictures. They differ from those of a language model."""
