"""The book: a static site of the repository's pages, by Sphinx, MyST and furo. No page is written for it alone.

pages     which Markdown pages there are, and their order
code      a source file, or two side by side, as HTML
rungs     what a rung's page has besides, from its data
speed     a chart of its speed
sources   the Markdown that Sphinx reads: its links lead to pages
words     the glossary's words, as links with their meaning
build     runs Sphinx
"""
