"""Draft-head training: from conversations to a head that loads in the decoder and elsewhere.

`prepare` turns conversations into token shards (`conversations` reads and cleans them, `shards` is
the file format). The features that a head learns from come from the target model; `fit` trains the
head. Shape letters are those of the library, and C counts conversations.
"""
