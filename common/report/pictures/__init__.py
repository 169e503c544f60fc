"""Pictures of what the code does, made from it: layouts and lanes evaluated from common/cuda, loop orders recorded.

svg         shapes and text           device    runs the device headers on the host
layouts     pictures of memory        loops     pictures of loop orders, traffic and machine code
timelines   who did what when on a GPU
gallery     every picture, by the path that it is kept at
"""
