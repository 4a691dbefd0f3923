"""The only package of the library that imports Ray: thin actors around plain classes, and how they find each other."""
