"""Runs a function in the child of a fork: one import of torch serves many fresh processes."""

import json
import os


def in_child(function, *arguments):
    """What `function` returns, by way of JSON; the text of an exception that it raises."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            result = function(*arguments)
        except BaseException as error:
            result = repr(error)
        with open(writer, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        result = json.load(pipe)
    os.wait()
    return result
