"""Objects in memory and in a folder behave alike, and as a sorted dictionary does."""

from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from kit.cloud.objects import FolderObjects, KeyRefused, MemoryObjects, describe, list_page

NAMES = st.text("ab-/0", min_size=1, max_size=6).filter(lambda key: all(part for part in key.split("/")))
PREFIXES = st.text("ab-/0", max_size=4)


def plain_listing(keys, prefix, delimiter):
    items, groups = [], []
    for key in sorted(keys):
        if key.startswith(prefix):
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                groups.append(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                items.append(key)
    return items, list(dict.fromkeys(groups))


def all_pages(objects, prefix, delimiter, limit):
    keys, groups, after, pages = [], [], "", 0
    while True:
        page = list_page(objects, "bucket", prefix, delimiter, after, limit)
        assert len(page.keys) + len(page.prefixes) <= limit
        keys += page.keys
        groups += page.prefixes
        pages += 1
        after = page.next_after
        if not after:
            return keys, groups, pages


@given(
    names=st.sets(NAMES, max_size=12), prefix=PREFIXES, delimiter=st.sampled_from(["", "/"]), limit=st.integers(1, 5)
)
@examples(150)
def test_pages_of_a_listing_put_together_are_the_plain_listing(tmp_path_factory, names, prefix, delimiter, limit):
    for objects in (MemoryObjects(), FolderObjects(tmp_path_factory.mktemp("objects"))):
        objects.create_bucket("bucket")
        held = set()
        for name in sorted(names, key=len):
            try:
                objects.put("bucket", name, describe(name.encode(), 1))
                held.add(name)
            except KeyRefused:  # a folder holds no key below another
                assert any(name.startswith(f"{other}/") or other.startswith(f"{name}/") for other in held)
        keys, groups, pages = all_pages(objects, prefix, delimiter, limit)
        assert (keys, groups) == plain_listing(held, prefix, delimiter)
        assert pages <= max(1, -(-(len(keys) + len(groups)) // limit))


@given(
    steps=st.lists(st.tuples(st.sampled_from(["put", "delete"]), st.sampled_from(["a", "b", "c/d", "c/e", "f/g/h"])))
)
@examples(60)
def test_puts_and_deletions_end_as_in_a_dictionary(tmp_path_factory, steps):
    for objects in (MemoryObjects(), FolderObjects(tmp_path_factory.mktemp("objects"))):
        objects.create_bucket("bucket")
        held = {}
        for number, (step, key) in enumerate(steps):
            if step == "put":
                held[key] = b"%d" % number
                objects.put("bucket", key, describe(held[key], number))
            else:
                assert objects.delete("bucket", key) == (held.pop(key, None) is not None)
        assert {key: objects.find("bucket", key).read() for key in objects.keys("bucket", "", "")} == held
        assert objects.delete_bucket("bucket") == (not held)


def test_a_file_that_is_replaced_while_it_is_served_is_served_as_it_was(tmp_path):
    objects = FolderObjects(tmp_path)
    objects.create_bucket("bucket")
    item = objects.put("bucket", "a", describe(b"first", 1))
    body = item.open(0, 5)
    changed = objects.put("bucket", "a", describe(b"other", 2))
    assert body.piece(0, 5) == b"first"
    assert item.etag != changed.etag
    body.close()
    body.close()
    assert sorted(path.name for path in (tmp_path / "bucket").iterdir()) == ["a"]
