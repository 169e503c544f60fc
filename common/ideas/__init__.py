"""From an idea to a verdict on it.

scaffold   a new rung, made from another     trial   what a rung gives beside its parent: right, shorter, faster
verdict    the same in words                 tried   the log of trials, and its table on the rung's page
watch      a trial at every save
"""
