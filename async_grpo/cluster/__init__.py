"""The only room that imports ray: thin actors around plain classes, their names, and how they find each other."""
