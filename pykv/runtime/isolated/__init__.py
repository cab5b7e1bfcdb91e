"""A model in a process of its own, and its contexts, with the interface that they have in this one."""
