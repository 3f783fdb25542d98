"""Checks the commands that a user types first after installing the program."""

from conftest import DONE, USAGE


def test_no_command_shows_the_help(person):
    ended = person.types("accelmgr")
    assert ended.code == USAGE
    assert "accelmgr train" in ended.text


def test_a_short_training_says_what_came_of_it(person):
    ended = person.types("accelmgr train -c small.yaml")
    assert ended.code == DONE, ended.err
    assert "done: 10 steps" in ended.out
    assert person.files() == set()
