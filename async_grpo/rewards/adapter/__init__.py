"""The interface of rewards: the registry file, decorators, traits, and the results that rewards return."""
