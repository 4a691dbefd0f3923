"""Send the weights of each new policy to the engines, and prove that the engines compute with them."""
