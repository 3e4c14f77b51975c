import unittest

from intervals import merge


class MergeTest(unittest.TestCase):
    def test_nothing_to_join(self):
        self.assertEqual(merge([]), [])
        self.assertEqual(merge([(5, 6), (1, 2)]), [(1, 2), (5, 6)])

    def test_overlapping_ones_are_joined(self):
        self.assertEqual(merge([(1, 4), (3, 6), (8, 9)]), [(1, 6), (8, 9)])

    def test_touching_ones_are_joined(self):
        self.assertEqual(merge([(1, 2), (2, 3)]), [(1, 3)])

    def test_one_inside_another(self):
        self.assertEqual(merge([(1, 10), (2, 3), (4, 5)]), [(1, 10)])

    def test_the_given_list_stays_as_it_is(self):
        given = [(3, 4), (1, 2)]
        merge(given)
        self.assertEqual(given, [(3, 4), (1, 2)])

    def test_an_end_before_its_start_is_an_error(self):
        with self.assertRaises(ValueError):
            merge([(1, 2), (4, 3)])


if __name__ == "__main__":
    unittest.main()
