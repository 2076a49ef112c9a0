"""How variants of our own kernels are prepared for `cute.compile`, each operation's in a module of its own, with which
it is compiled anew where that changes. Importing these imports no compiler."""
