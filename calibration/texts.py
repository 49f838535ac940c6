"""Built-in text to measure a model with during a build: prose, dialogue and code, written for this purpose."""

TEXTS = (
    "The library opens at nine. On weekdays it is mostly students who come, and they stay until the evening; on "
    "Saturdays whole families sit on the floor between the shelves and read aloud. Last year the town bought forty "
    "new chairs, but the children still prefer the floor.",
    "To plant a hedge, first dig a trench about forty centimetres wide. Loosen the soil at the bottom with a fork. "
    "Then place the plants at equal distances, fill the trench with earth, and press it down with your foot. Water "
    "the hedge well in the first weeks, especially if it does not rain.",
    "Question: Why is the sky red in the evening?\nAnswer: When the sun is low, its light travels a longer way "
    "through the air. The blue part of the light is scattered away on this path, and what reaches our eyes is mostly "
    "red and orange.\nQuestion: Does that happen in the morning as well?\nAnswer: Yes, for the same reason.",
    "def running_mean(values, width):\n    means = []\n    total = 0.0\n    for index, value in enumerate(values):\n"
    "        total += value\n        if index >= width:\n            total -= values[index - width]\n"
    "        means.append(total / min(index + 1, width))\n    return means\n\n\ndef running_max(values, width):\n"
    "    best = []\n    for index in range(len(values)):\n        start = max(0, index - width + 1)\n"
    "        best.append(max(values[start : index + 1]))\n    return best\n",
    "Dear Ms. Okafor,\n\nthank you for your message of last Thursday. I am sorry to hear that the parcel was damaged "
    "when it arrived. We have sent you a new one this morning; you should receive it within three days. You do not "
    "need to return the old parcel.\n\nBest regards,\nthe customer service team",
)
