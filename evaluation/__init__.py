"""Evaluation: answers in FastChat's format, scores, speed, and replay of all rules.

Every command reads questions in FastChat's format (`questions`), groups them into tasks (`tasks`)
and decodes with the same `SpeculativeDecoder` as everything else.
"""
