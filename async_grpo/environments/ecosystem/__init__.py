"""Environments of other libraries, each behind the methods of an `Environment`. Their files are shipped as text."""
