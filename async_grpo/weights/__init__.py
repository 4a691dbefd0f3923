"""The weight sync: sends the weights of each new policy to the engines, and proves that they have landed."""
