"""What a reward is: the functions of the registry file, their traits, and the results that they return."""
