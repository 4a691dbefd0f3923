"""What a reward is: the functions of the registry file, their traits, and the results they give."""
