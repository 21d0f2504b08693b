"""Substitutions of tensor terms: declarations, generation, proofs, matching, lists.

:mod:`sizes` has symbolic sizes, :mod:`terms` hash-consed terms, :mod:`operators` one row per operator, :mod:`rule` a
substitution, ``verify_*`` the four layers of a certificate, :mod:`generate` finds new ones, :mod:`store` keeps them.
"""
